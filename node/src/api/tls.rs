//! TLS for clients, if asked for: TLS 1.3, HTTP/2 and HTTP/1.1 by ALPN.

use std::fmt;
use std::sync::Arc;

use rustls::ServerConfig;
use rustls::crypto::aws_lc_rs;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem};
use tokio_rustls::TlsAcceptor;

/// A certificate and its key, ready to use.
#[derive(Clone)]
pub struct Tls {
    config: Arc<ServerConfig>,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

/// Why certificate and key cannot be used. Nothing listens yet.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The certificate file is not PEM.
    #[error("the certificate cannot be read: {0}")]
    Certificate(#[source] pem::Error),
    /// The certificate file has no certificate.
    #[error("the certificate file has no certificate in it")]
    NoCertificate,
    /// The key file is not PEM, or has no key.
    #[error("the private key cannot be read: {0}")]
    Key(#[source] pem::Error),
    /// They do not belong together, or are of a kind that is not supported.
    #[error("certificate and key cannot be used: {0}")]
    Unusable(#[from] rustls::Error),
}

impl Tls {
    /// Reads a certificate chain (leaf first) and the leaf's private key, both PEM.
    ///
    /// # Errors
    /// One of them cannot be read, or they do not fit.
    pub fn from_pem(certificates: &[u8], key: &[u8]) -> Result<Self, TlsError> {
        let chain = CertificateDer::pem_slice_iter(certificates)
            .collect::<Result<Vec<_>, _>>()
            .map_err(TlsError::Certificate)?;
        if chain.is_empty() {
            return Err(TlsError::NoCertificate);
        }
        let key = PrivateKeyDer::from_pem_slice(key).map_err(TlsError::Key)?;
        // Named, since a process with two providers compiled in has no default one.
        let provider = Arc::new(aws_lc_rs::default_provider());
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self {
            config: Arc::new(config),
        })
    }

    pub(super) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.config))
    }
}
