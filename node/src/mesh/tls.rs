//! TLS of the stream plane: each side proves its `PeerId` with the certificate libp2p uses, and each
//! side checks whom it speaks to *during* the handshake.
//!
//! Own configurations and not `libp2p_tls::make_*_config`: those put ChaCha20 first (measured: twice
//! the CPU of AES-128-GCM where AES is in hardware), accept any client, know only libp2p's ALPN, and
//! write session secrets to the file that `SSLKEYLOGFILE` names. Nothing here logs keys. Sessions are
//! never resumed, since a resumed one would not present its certificate to the verifier again.

use std::fmt;
use std::sync::Arc;

use libp2p::PeerId;
use libp2p::identity::Keypair;
use libp2p_tls::certificate;
use quinn::crypto::rustls::{NoInitialCipherSuite, QuicClientConfig, QuicServerConfig};
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs};
use rustls::server::NoServerSessionStorage;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, PeerIncompatible,
    SignatureScheme,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime};

/// ALPN of token streams.
pub const STREAM_ALPN: &[u8] = b"shoal/stream/1";

/// ALPN of KV bytes. They have connections of their own, so that nothing quick ever waits behind them.
pub const BULK_ALPN: &[u8] = b"shoal/bulk/1";

/// What rustls is told as server name. It goes nowhere: SNI is off and the verifier pins a `PeerId`.
pub(crate) const SERVER_NAME: &str = "shoal";

/// Signatures that libp2p's certificates may carry: P-256 as we and rust-libp2p make them, and Ed25519.
const SCHEMES: [SignatureScheme; 2] = [
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ED25519,
];

/// Why there is no TLS configuration.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The certificate cannot be made.
    #[error("the node's certificate cannot be made: {0}")]
    Certificate(#[from] certificate::GenError),
    /// rustls refuses it.
    #[error("TLS cannot be configured: {0}")]
    Rustls(#[from] Error),
    /// The provider lacks the cipher of QUIC's first packets.
    #[error("TLS cannot be configured: {0}")]
    Cipher(#[from] NoInitialCipherSuite),
}

/// Decides during the handshake whether a proven identity may go on.
pub(crate) type Admit = Arc<dyn Fn(&PeerId) -> bool + Send + Sync>;

/// The node's certificate, made once, and the configurations that present it.
#[derive(Clone, Debug)]
pub(crate) struct PeerTls {
    presented: Arc<Presented>,
    provider: Arc<CryptoProvider>,
}

impl PeerTls {
    pub(crate) fn new(keypair: &Keypair) -> Result<Self, TlsError> {
        let (certificate, key) = certificate::generate(keypair)?;
        let key = aws_lc_rs::sign::any_ecdsa_type(&key)?;
        Ok(Self {
            presented: Arc::new(Presented(Arc::new(CertifiedKey::new(
                vec![certificate],
                key,
            )))),
            provider: Arc::new(provider()),
        })
    }

    /// Accepts clients that speak one of `alpns` and whose identity `admit` lets in.
    pub(crate) fn server(
        &self,
        alpns: &[&[u8]],
        admit: Admit,
    ) -> Result<QuicServerConfig, TlsError> {
        Ok(QuicServerConfig::try_from(
            self.plain_server(alpns, admit)?,
        )?)
    }

    /// The same, for TLS over anything.
    pub(crate) fn plain_server(
        &self,
        alpns: &[&[u8]],
        admit: Admit,
    ) -> Result<rustls::ServerConfig, TlsError> {
        let mut config = rustls::ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(Arc::new(PeerVerifier { admit }))
            .with_cert_resolver(Arc::clone(&self.presented) as _);
        config.alpn_protocols = alpns.iter().map(|alpn| alpn.to_vec()).collect();
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    /// Speaks to `expected` only.
    pub(crate) fn client(
        &self,
        alpn: &[u8],
        expected: PeerId,
    ) -> Result<QuicClientConfig, TlsError> {
        Ok(QuicClientConfig::try_from(
            self.plain_client(alpn, expected)?,
        )?)
    }

    /// The same, for TLS over anything.
    pub(crate) fn plain_client(
        &self,
        alpn: &[u8],
        expected: PeerId,
    ) -> Result<rustls::ClientConfig, TlsError> {
        let admit: Admit = Arc::new(move |peer| *peer == expected);
        let mut config = rustls::ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(PeerVerifier { admit }))
            .with_client_cert_resolver(Arc::clone(&self.presented) as _);
        config.alpn_protocols = vec![alpn.to_vec()];
        config.enable_sni = false;
        config.resumption = Resumption::disabled();
        Ok(config)
    }
}

/// AES-128-GCM first, named and not the process default, which is ambiguous when two providers are
/// linked; ChaCha20 for machines without AES instructions on the other side.
fn provider() -> CryptoProvider {
    let mut provider = aws_lc_rs::default_provider();
    provider.cipher_suites = vec![
        aws_lc_rs::cipher_suite::TLS13_AES_128_GCM_SHA256,
        aws_lc_rs::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    provider
}

/// The identity proven by the certificate of an established connection.
pub(crate) fn peer_of(connection: &quinn::Connection) -> Option<PeerId> {
    let chain = connection
        .peer_identity()?
        .downcast::<Vec<CertificateDer<'static>>>()
        .ok()?;
    certificate::parse(chain.first()?)
        .ok()
        .map(|certificate| certificate.peer_id())
}

/// Which of the ALPNs an established connection speaks.
pub(crate) fn alpn_of(connection: &quinn::Connection) -> Option<Vec<u8>> {
    connection
        .handshake_data()?
        .downcast::<quinn::crypto::rustls::HandshakeData>()
        .ok()?
        .protocol
}

#[derive(Debug)]
struct Presented(Arc<CertifiedKey>);

impl rustls::client::ResolvesClientCert for Presented {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl rustls::server::ResolvesServerCert for Presented {
    fn resolve(&self, _: rustls::server::ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.0))
    }
}

/// One certificate, self-signed, that carries a libp2p identity which `admit` lets in.
struct PeerVerifier {
    admit: Admit,
}

impl fmt::Debug for PeerVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PeerVerifier")
    }
}

impl PeerVerifier {
    fn check(&self, end: &CertificateDer<'_>, chain: &[CertificateDer<'_>]) -> Result<(), Error> {
        if !chain.is_empty() {
            return Err(Error::General(
                "exactly one certificate is allowed".to_owned(),
            ));
        }
        let peer = certificate::parse(end)?.peer_id();
        if (self.admit)(&peer) {
            Ok(())
        } else {
            Err(CertificateError::ApplicationVerificationFailure.into())
        }
    }

    fn check_signature(
        message: &[u8],
        end: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        certificate::parse(end)?.verify_signature(signed.scheme, message, signed.signature())?;
        Ok(HandshakeSignatureValid::assertion())
    }

    /// QUIC has no TLS 1.2, and none is offered.
    fn no_tls12() -> Result<HandshakeSignatureValid, Error> {
        Err(PeerIncompatible::Tls12NotOfferedOrEnabled.into())
    }
}

impl ServerCertVerifier for PeerVerifier {
    fn verify_server_cert(
        &self,
        end: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(end, chain)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Self::no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        end: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Self::check_signature(message, end, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        SCHEMES.to_vec()
    }
}

impl ClientCertVerifier for PeerVerifier {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(end, chain)?;
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Self::no_tls12()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        end: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Self::check_signature(message, end, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        SCHEMES.to_vec()
    }
}
