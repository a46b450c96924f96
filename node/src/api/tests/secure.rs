//! TLS, and HTTP/2 with and without it.

use std::sync::Arc;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2::{SendRequest, handshake};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::aws_lc_rs;
use rustls::{ClientConfig, DigitallySignedStruct, SignatureScheme};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::support::{Client, Server, THIS, finished, get, tokens, within};
use crate::api::{ApiConfig, Tls, TlsError};

const BODY: &str = r#"{"model":"m","prompt":"hi","stream":true}"#;

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let mut bits = [0u8; 3];
        bits[..group.len()].copy_from_slice(group);
        let bits = u32::from_be_bytes([0, bits[0], bits[1], bits[2]]);
        for place in 0..4 {
            let letter = LETTERS[(bits >> (18 - 6 * place) & 63) as usize];
            text.push(if place > group.len() {
                '='
            } else {
                letter as char
            });
        }
    }
    text
}

fn pem(kind: &str, der: &[u8]) -> Vec<u8> {
    format!(
        "-----BEGIN {kind}-----\n{}\n-----END {kind}-----\n",
        base64(der)
    )
    .into_bytes()
}

/// A fresh certificate and its key.
fn identity() -> (Vec<u8>, Vec<u8>) {
    let keypair = libp2p::identity::Keypair::generate_ed25519();
    let (certificate, key) = libp2p_tls::certificate::generate(&keypair).unwrap();
    let key = match &key {
        PrivateKeyDer::Pkcs8(key) => key.secret_pkcs8_der().to_vec(),
        other => panic!("unexpected key {other:?}"),
    };
    (pem("CERTIFICATE", &certificate), pem("PRIVATE KEY", &key))
}

/// Takes any certificate: these tests are about the server.
#[derive(Debug)]
struct Trusting;

impl ServerCertVerifier for Trusting {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        aws_lc_rs::default_provider()
            .signature_verification_algorithms
            .supported_schemes()
    }
}

async fn tls_client(server: &Server, alpn: &[&str]) -> TlsStream<TcpStream> {
    let mut config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Trusting))
        .with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
    let socket = TcpStream::connect(server.addr).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    within(TlsConnector::from(Arc::new(config)).connect(name, socket))
        .await
        .unwrap()
}

async fn secure_server() -> Server {
    let (certificate, key) = identity();
    let config = ApiConfig {
        tls: Some(Tls::from_pem(&certificate, &key).unwrap()),
        header_timeout: std::time::Duration::from_millis(300),
        ..ApiConfig::default()
    };
    Server::start(config).await
}

async fn h2<S>(socket: S, tasks: &mut JoinSet<()>) -> SendRequest<Full<Bytes>>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let (sender, connection) = within(handshake(TokioExecutor::new(), TokioIo::new(socket)))
        .await
        .unwrap();
    tasks.spawn(async move {
        // Its end is the test's end.
        drop(connection.await);
    });
    sender
}

fn post_h2() -> hyper::Request<Full<Bytes>> {
    hyper::Request::post("http://localhost/v1/completions")
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from_static(BODY.as_bytes())))
        .unwrap()
}

#[tokio::test]
async fn http1_works_over_tls() {
    let server = secure_server().await;
    let mut client = Client::new(tls_client(&server, &["http/1.1"]).await);
    client.send(get("/ping")).await;
    assert_eq!(client.answer().await.status, 200);
}

#[tokio::test]
async fn http2_is_offered_over_tls_and_streams() {
    let mut server = secure_server().await;
    let socket = tls_client(&server, &["h2", "http/1.1"]).await;
    assert_eq!(socket.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let mut tasks = JoinSet::new();
    let mut sender = h2(socket, &mut tasks).await;
    let answer = sender.send_request(post_h2());
    let serve = async {
        let events = server.arrival().await.accept(4);
        events.send(tokens("a")).await.unwrap();
        events.send(finished()).await.unwrap();
    };
    let (answer, ()) = within(async { tokio::join!(answer, serve) }).await;
    let answer = answer.unwrap();
    assert_eq!(answer.status(), 200);
    assert!(answer.headers().contains_key("x-request-id"));
    let body = within(answer.into_body().collect())
        .await
        .unwrap()
        .to_bytes();
    assert!(body.ends_with(b"data: [DONE]\n\n"));
}

#[tokio::test]
async fn plain_text_and_silence_on_a_tls_port_end_their_connection_only() {
    let server = secure_server().await;
    let mut plain = server.connect().await;
    plain.send(get("/ping")).await;
    let rest = plain.rest().await;
    assert!(!rest.starts_with(b"HTTP/"));
    let mut silent = server.connect().await;
    assert_eq!(silent.rest().await, b"");
    let mut client = Client::new(tls_client(&server, &[]).await);
    client.send(get("/ping")).await;
    assert_eq!(client.answer().await.status, 200);
}

#[tokio::test]
async fn a_reset_stream_of_http2_ends_its_request_in_every_phase_and_no_other() {
    let mut server = Server::start(ApiConfig::default()).await;
    let mut tasks = JoinSet::new();
    let socket = TcpStream::connect(server.addr).await.unwrap();
    let mut sender = h2(socket, &mut tasks).await;

    // One that lasts.
    let mut lasting = JoinSet::new();
    lasting.spawn(sender.send_request(post_h2()));
    let lasting_events = server.arrival().await.accept(4);

    // Placing.
    let mut asking = JoinSet::new();
    asking.spawn(sender.send_request(post_h2()));
    let arrival = server.arrival().await;
    drop(asking);
    arrival.given_up().await;

    // Before the first token.
    let mut asking = JoinSet::new();
    asking.spawn(sender.send_request(post_h2()));
    let events = server.arrival().await.accept(4);
    drop(asking);
    within(events.closed()).await;

    // Between tokens.
    let mut asking = JoinSet::new();
    asking.spawn(sender.send_request(post_h2()));
    let events = server.arrival().await.accept(4);
    events.send(tokens("a")).await.unwrap();
    let answer = within(asking.join_next()).await.unwrap().unwrap().unwrap();
    let mut body = answer.into_body();
    within(body.frame()).await.unwrap().unwrap();
    drop(body);
    within(events.closed()).await;

    lasting_events.send(tokens("z")).await.unwrap();
    lasting_events.send(finished()).await.unwrap();
    let answer = within(lasting.join_next()).await.unwrap().unwrap().unwrap();
    let body = within(answer.into_body().collect())
        .await
        .unwrap()
        .to_bytes();
    assert!(body.ends_with(b"data: [DONE]\n\n"));
    server
        .counted(&format!("shoal_requests_in_flight{{node=\"{THIS}\"}} 0"))
        .await;
}

#[test]
fn a_bad_certificate_or_key_is_refused() {
    let (certificate, key) = identity();
    let (_, other_key) = identity();
    assert!(Tls::from_pem(&certificate, &key).is_ok());
    assert!(matches!(
        Tls::from_pem(b"", &key).unwrap_err(),
        TlsError::NoCertificate
    ));
    assert!(matches!(
        Tls::from_pem(&certificate[..certificate.len() - 30], &key).unwrap_err(),
        TlsError::Certificate(_)
    ));
    assert!(matches!(
        Tls::from_pem(&certificate, b"junk").unwrap_err(),
        TlsError::Key(_)
    ));
    assert!(matches!(
        Tls::from_pem(&certificate, &other_key).unwrap_err(),
        TlsError::Unusable(_)
    ));
    assert!(matches!(
        Tls::from_pem(&pem("CERTIFICATE", b"not DER"), &key).unwrap_err(),
        TlsError::Unusable(_)
    ));
}
