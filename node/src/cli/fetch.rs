//! One small HTTP request, with errors that say what to do.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use clap::Args;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Request, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, ServerName};
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use crate::cli::output::{fail, print};

/// Longest answer that is read: some 4,000 nodes (the bound of a mesh) of 2 KiB each.
const MAX_ANSWER: usize = 8 * 1024 * 1024;

/// Which node, and how to speak to it.
#[derive(Clone, Debug, Args)]
pub(super) struct NodeArgs {
    /// Any node of the mesh.
    #[arg(
        long,
        env = "SHOAL_NODE",
        value_name = "URL",
        default_value = "http://127.0.0.1:8080"
    )]
    pub(super) node: String,

    /// API key, if the node wants one.
    #[arg(
        long,
        env = "SHOAL_API_KEY",
        value_name = "KEY",
        hide_env_values = true
    )]
    pub(super) api_key: Option<String>,

    /// Certificate authority in PEM that signed the node's certificate; needed for https.
    #[arg(long, value_name = "FILE")]
    pub(super) ca_cert: Option<PathBuf>,
}

/// What is asked, of whom.
#[derive(Clone, Debug)]
pub(super) struct Question<'a> {
    /// The node.
    pub(super) at: &'a NodeArgs,
    /// The path.
    pub(super) path: &'a str,
    /// JSON to post; `None` gets.
    pub(super) body: Option<String>,
    /// Time for all of it.
    pub(super) deadline: Duration,
}

/// Why there is no answer. Nothing was changed anywhere.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    /// The address cannot be read.
    #[error("`{0}` is not the address of a node; give one like http://127.0.0.1:8080")]
    BadUrl(String),
    /// Nobody listens there.
    #[error("no node answers at {url} ({source}); is it running, and is this its --http-port?")]
    Unreachable {
        /// Where.
        url: String,
        /// Why.
        source: io::Error,
    },
    /// Somebody listens there and says nothing.
    #[error("{url} did not answer within {} ms; a larger --timeout-ms waits longer", deadline.as_millis())]
    Silent {
        /// Where.
        url: String,
        /// How long.
        deadline: Duration,
    },
    /// https without a certificate authority to trust.
    #[error("for https name the authority that signed the node's certificate with --ca-cert")]
    NoAuthority,
    /// The file of the certificate authority is of no use.
    #[error("--ca-cert {}: {reason}", path.display())]
    BadAuthority {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The node's certificate was not accepted, or it does not speak TLS.
    #[error(
        "no TLS with {url}: {source}; does the node have --tls-cert, and does --ca-cert belong to it?"
    )]
    Tls {
        /// Where.
        url: String,
        /// Why.
        source: io::Error,
    },
    /// The key was missing or wrong.
    #[error(
        "{url} wants an API key, and not this one; give a line of its --api-key-file with --api-key or SHOAL_API_KEY"
    )]
    Unauthorized {
        /// Where.
        url: String,
    },
    /// The node did not do it.
    #[error("{message}")]
    Refused {
        /// In the node's words.
        message: String,
    },
    /// Something answered that is not a node.
    #[error("{url} answers, but it is not a shoal node; is this its --http-port?")]
    NotANode {
        /// Where.
        url: String,
    },
}

/// Runs a command that asks a node something, and prints its text.
pub(super) fn run(command: impl Future<Output = Result<String, FetchError>>) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => return fail(format_args!("cannot start: {error}")),
    };
    match runtime.block_on(command) {
        Ok(text) => print(&text),
        Err(error) => fail(error),
    }
}

/// Asks and returns the body of a good answer.
pub(super) async fn ask(question: &Question<'_>) -> Result<Bytes, FetchError> {
    match timeout(question.deadline, ask_without_deadline(question)).await {
        Ok(answer) => answer,
        Err(_) => Err(FetchError::Silent {
            url: question.at.node.clone(),
            deadline: question.deadline,
        }),
    }
}

async fn ask_without_deadline(question: &Question<'_>) -> Result<Bytes, FetchError> {
    let url = question.at.node.clone();
    let bad_url = || FetchError::BadUrl(url.clone());
    let full = match url.contains("://") {
        true => url.clone(),
        false => format!("http://{url}"),
    };
    let uri: Uri = full.parse().map_err(|_| bad_url())?;
    let host = uri.host().ok_or_else(bad_url)?;
    let host = host.trim_matches(['[', ']']);
    let (secure, port) = match uri.scheme_str() {
        Some("http") => (false, uri.port_u16().unwrap_or(80)),
        Some("https") => (true, uri.port_u16().unwrap_or(443)),
        _ => return Err(bad_url()),
    };
    let authority = uri.authority().ok_or_else(bad_url)?.as_str();
    let mut request = match question.body {
        None => Request::get(question.path),
        Some(_) => Request::post(question.path).header(CONTENT_TYPE, "application/json"),
    }
    .header(HOST, authority);
    if let Some(key) = &question.at.api_key {
        request = request.header(AUTHORIZATION, format!("Bearer {key}"));
    }
    let body = Full::from(question.body.clone().unwrap_or_default());
    let request = request.body(body).map_err(|_| bad_url())?;
    let tls = match secure {
        true => Some(connector(question.at.ca_cert.as_deref())?),
        false => None,
    };
    let tcp = TcpStream::connect((host, port))
        .await
        .map_err(|source| FetchError::Unreachable {
            url: url.clone(),
            source,
        })?;
    match tls {
        None => exchange(tcp, request, &url).await,
        Some(connector) => {
            let name = ServerName::try_from(host.to_owned()).map_err(|_| bad_url())?;
            let stream = connector
                .connect(name, tcp)
                .await
                .map_err(|source| FetchError::Tls {
                    url: url.clone(),
                    source,
                })?;
            exchange(stream, request, &url).await
        }
    }
}

/// Trusts the authorities in one file and nobody else.
fn connector(authority: Option<&Path>) -> Result<TlsConnector, FetchError> {
    let path = authority.ok_or(FetchError::NoAuthority)?;
    let bad = |reason: String| FetchError::BadAuthority {
        path: path.to_owned(),
        reason,
    };
    let mut roots = RootCertStore::empty();
    let certificates =
        CertificateDer::pem_file_iter(path).map_err(|error| bad(error.to_string()))?;
    for certificate in certificates {
        let certificate = certificate.map_err(|error| bad(error.to_string()))?;
        roots
            .add(certificate)
            .map_err(|error| bad(error.to_string()))?;
    }
    if roots.is_empty() {
        return Err(bad("it holds no certificate".to_owned()));
    }
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| bad(error.to_string()))?
        .with_root_certificates(roots)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

#[derive(Deserialize)]
struct Complaint {
    error: ComplaintInner,
}

#[derive(Deserialize)]
struct ComplaintInner {
    message: String,
    code: Option<String>,
}

/// Sends the request over a fresh connection and reads the whole answer.
async fn exchange<S>(
    stream: S,
    request: Request<Full<Bytes>>,
    url: &str,
) -> Result<Bytes, FetchError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let not_a_node = || FetchError::NotANode {
        url: url.to_owned(),
    };
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
        .await
        .map_err(|_| not_a_node())?;
    let answer = async {
        let response = sender
            .send_request(request)
            .await
            .map_err(|_| not_a_node())?;
        let status = response.status();
        if status == StatusCode::UNAUTHORIZED {
            return Err(FetchError::Unauthorized {
                url: url.to_owned(),
            });
        }
        let body = Limited::new(response.into_body(), MAX_ANSWER);
        let whole = body.collect().await.map_err(|_| not_a_node())?.to_bytes();
        if status.is_success() {
            return Ok(whole);
        }
        // Nodes say what is wrong in OpenAI's shape.
        match serde_json::from_slice::<Complaint>(&whole) {
            Ok(Complaint { error }) if error.code.is_some() => Err(FetchError::Refused {
                message: error.message,
            }),
            Ok(_) | Err(_) => Err(not_a_node()),
        }
    };
    tokio::pin!(answer);
    tokio::select! {
        biased;
        answer = &mut answer => answer,
        // The connection may end (`connection: close`) while the last of the body waits to be read.
        _ = connection => answer.await,
    }
}
