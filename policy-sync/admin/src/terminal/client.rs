//! Asks the API.

use std::{fs, time::Duration};

use serde_json::Value;
use thiserror::Error;
use ureq::{
    Agent,
    http::{Method, Request},
};

use crate::cli::ApiArgs;

/// The longest that an answer may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// The largest answer.
const ANSWER_BYTES_MAX: u64 = 256 << 20;

/// Why a command could not be carried out.
#[derive(Debug, Error)]
pub enum TerminalError {
    /// There is no token.
    #[error("set SLUICE_ADMIN_TOKEN to a token of the API, or name a file with one by --token-file")]
    NoToken,
    /// A file cannot be read.
    #[error("{path}: {why}")]
    File {
        /// Which.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// The API does not answer.
    #[error("{url}: {why} (is `sluice-admin serve` running there?)")]
    Away {
        /// Where.
        url: String,
        /// What happened.
        why: String,
    },
    /// The API says no.
    #[error("{0}")]
    Refused(String),
    /// A field=value is none.
    #[error("{0}")]
    Field(String),
    /// The output cannot be written.
    #[error("{0}")]
    Write(#[from] std::io::Error),
}

/// Asks the API.
pub(super) struct Client {
    agent: Agent,
    url: String,
    token: String,
}

/// What it says.
pub(super) struct Answer {
    pub(super) etag: Option<String>,
    pub(super) text: String,
}

impl Answer {
    pub(super) fn json(&self) -> Result<Value, TerminalError> {
        serde_json::from_str(&self.text)
            .map_err(|error| TerminalError::Refused(format!("the answer is no JSON: {error}")))
    }
}

impl Client {
    pub(super) fn new(api: &ApiArgs) -> Result<Self, TerminalError> {
        let token = match &api.token_file {
            Some(path) => fs::read_to_string(path)
                .map_err(|error| TerminalError::File { path: path.display().to_string(), why: error.to_string() })?,
            None => std::env::var("SLUICE_ADMIN_TOKEN").map_err(|_| TerminalError::NoToken)?,
        };
        let config = Agent::config_builder().http_status_as_error(false).timeout_global(Some(PATIENCE));
        let url = api.url.trim_end_matches('/').to_owned();
        Ok(Self { agent: config.build().into(), url, token: token.trim().to_owned() })
    }

    pub(super) fn get(&self, path: &str, query: &[(&str, String)]) -> Result<Answer, TerminalError> {
        self.send(&Method::GET, path, query, None, String::new())
    }

    /// `tag` is what If-Match says.
    pub(super) fn send(
        &self,
        method: &Method,
        path: &str,
        query: &[(&str, String)],
        tag: Option<&str>,
        body: String,
    ) -> Result<Answer, TerminalError> {
        let away = |why: String| TerminalError::Away { url: self.url.clone(), why };
        let query: Vec<String> = query.iter().map(|(name, value)| format!("{name}={}", escaped(value))).collect();
        let separator = if query.is_empty() { "" } else { "?" };
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}{separator}{}", self.url, query.join("&")))
            .header("Authorization", format!("Bearer {}", self.token));
        if let Some(tag) = tag {
            request = request.header("If-Match", tag);
        }
        // Only some methods have a body.
        let answer = if *method == Method::GET || *method == Method::DELETE {
            request.body(()).map_err(|error| away(error.to_string())).map(|request| self.agent.run(request))?
        } else {
            request.body(body).map_err(|error| away(error.to_string())).map(|request| self.agent.run(request))?
        };
        let mut answer = answer.map_err(|error| away(error.to_string()))?;
        let etag = answer.headers().get("etag").and_then(|tag| tag.to_str().ok()).map(str::to_owned);
        let text = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_string();
        let text = text.map_err(|error| away(error.to_string()))?;
        match answer.status() {
            status if status.is_success() => Ok(Answer { etag, text }),
            status => Err(TerminalError::Refused(explained(status.as_u16(), &text))),
        }
    }
}

/// A value as a path or query has it.
pub(super) fn escaped(text: &str) -> String {
    let mut out = Vec::new();
    policy_sync::identity::encode_value(text.as_bytes(), &mut out);
    String::from_utf8_lossy(&out).into_owned()
}

/// A problem in words, with a line for each thing that is wrong.
fn explained(status: u16, text: &str) -> String {
    let Ok(problem) = serde_json::from_str::<Value>(text) else { return format!("the API answers {status}") };
    let word = |value: &Value, name: &str| value[name].as_str().unwrap_or_default().to_owned();
    let errors = problem["errors"].as_array().cloned().unwrap_or_default();
    let mut lines = vec![format!("{} ({status})", word(&problem, "title"))];
    if errors.is_empty() {
        lines.push(word(&problem, "detail"));
    }
    for error in &errors {
        let mut line = String::new();
        if let Some(number) = error["line"].as_u64() {
            line.push_str(&format!("line {number}: "));
        }
        if let Some(rule) = error["rule"].as_str() {
            line.push_str(&format!("rule {rule:?}: "));
        } else if error["override"].is_object() {
            line.push_str(&format!("override of {}: ", error["override"]));
        }
        if !word(error, "field").is_empty() {
            line.push_str(&format!("{}: ", word(error, "field")));
        }
        line.push_str(&word(error, "message"));
        if let Some(suggestion) = error["suggestion"].as_str() {
            line.push_str(&format!(" ({suggestion})"));
        }
        lines.push(line);
    }
    if let Some(more) = problem["errors_more"].as_u64() {
        lines.push(format!("and {more} more"));
    }
    lines.join("\n")
}
