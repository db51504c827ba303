//! gRPC over HTTP/2: Envoy's rate limit service v3, and the health service.
//!
//! One unary call is one request: a message of five bytes of head (compressed or not, and the length) and the protobuf.
//! `proto` has the messages, `rate_limit` answers `ShouldRateLimit`, `status` are gRPC's own codes.

mod proto;
mod rate_limit;
mod status;

use hyper::{
    HeaderMap, Request, Response,
    body::{Bytes, Incoming},
    header::{CONTENT_TYPE, HeaderName, HeaderValue},
};
use prost::Message;

use self::{
    proto::{HealthRequest, HealthResponse, RateLimitRequest},
    status::{Code, Status},
};
use super::{reply::Reply, service::Desk};

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";
/// What health is asked of: nothing in particular, or the service.
const SERVICES: [&str; 2] = ["", "envoy.service.ratelimit.v3.RateLimitService"];
const SERVING: i32 = 1;
const NOT_SERVING: i32 = 2;

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const GRPC_TIMEOUT: &str = "grpc-timeout";
/// Bytes before a message.
const HEAD_BYTES: usize = 5;

/// Whether a request is a gRPC call.
pub(super) fn is_grpc(request: &Request<Incoming>) -> bool {
    request.headers().get(CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"))
}

/// Answers a call.
pub(super) async fn answer(desk: Desk, request: Request<Incoming>) -> Response<Reply> {
    let outcome = call(&desk, request).await;
    let code = outcome.as_ref().map_or_else(|status| status.code, |_| Code::Ok);
    desk.web.counters.grpc(code as usize).add(1);
    let mut response = match outcome {
        Ok(message) => {
            let mut trailers = HeaderMap::with_capacity(1);
            trailers.insert(GRPC_STATUS, HeaderValue::from_static("0"));
            Response::new(Reply::of(message).with_trailers(trailers))
        }
        Err(status) => {
            let mut response = Response::new(Reply::default());
            response.headers_mut().insert(GRPC_STATUS, HeaderValue::from(status.code as u16));
            response.headers_mut().insert(GRPC_MESSAGE, status.message());
            response
        }
    };
    response.headers_mut().insert(CONTENT_TYPE, GRPC);
    response
}

async fn call(desk: &Desk, request: Request<Incoming>) -> Result<Bytes, Status> {
    match request.uri().path() {
        SHOULD_RATE_LIMIT => {
            if !desk.has_token(&request) {
                return Err(Status::new(
                    Code::Unauthenticated,
                    "the token is missing or wrong: send it as `authorization: Bearer` or `x-sluice-token`",
                ));
            }
            let timeout_us = request.headers().get(GRPC_TIMEOUT).map(|text| timeout_us(text.as_bytes())).transpose()?;
            let asked = message::<RateLimitRequest>(desk, request).await?;
            rate_limit::should_rate_limit(desk, &asked, timeout_us).await.map(|said| encode(&said))
        }
        HEALTH_CHECK => {
            let asked = message::<HealthRequest>(desk, request).await?;
            if !SERVICES.contains(&asked.service.as_str()) {
                return Err(Status::new(Code::NotFound, format!("there is no service {:?}", asked.service)));
            }
            let status = if desk.web.facts.is_serving() { SERVING } else { NOT_SERVING };
            Ok(encode(&HealthResponse { status }))
        }
        path => {
            let text = format!("{path} is not served: there are {SHOULD_RATE_LIMIT} and {HEALTH_CHECK}");
            Err(Status::new(Code::Unimplemented, text))
        }
    }
}

/// The one message of a call.
async fn message<M: Message + Default>(desk: &Desk, request: Request<Incoming>) -> Result<M, Status> {
    let max = desk.web.settings.body_bytes_max;
    let Some(body) = desk.body(request.into_body()).await else {
        let text = format!("the message is longer than {max} bytes (setting http.body_bytes_max), or breaks off");
        return Err(Status::new(Code::ResourceExhausted, text));
    };
    let Some((&[compressed, a, b, c, d], rest)) = body.split_first_chunk::<HEAD_BYTES>() else {
        return Err(Status::new(Code::InvalidArgument, "there is no message"));
    };
    if compressed != 0 {
        return Err(Status::new(Code::Unimplemented, "compressed messages are not understood"));
    }
    if rest.len() != u32::from_be_bytes([a, b, c, d]) as usize {
        return Err(Status::new(Code::InvalidArgument, "the message is not as long as it says, or there are several"));
    }
    M::decode(rest).map_err(|error| Status::new(Code::InvalidArgument, format!("the message cannot be read: {error}")))
}

fn encode(message: &impl Message) -> Bytes {
    let len = message.encoded_len();
    let mut out = Vec::with_capacity(HEAD_BYTES + len);
    out.push(0);
    // An answer is as long as its request allows, far below 4 GiB.
    out.extend_from_slice(&(len as u32).to_be_bytes());
    message.encode_raw(&mut out);
    out.into()
}

/// How long the caller waits, in microseconds: a number of at most eight digits and its unit.
fn timeout_us(text: &[u8]) -> Result<u64, Status> {
    let wrong = || Status::new(Code::InvalidArgument, "grpc-timeout is not a number with a unit of H, M, S, m, u or n");
    let (unit, digits) = text.split_last().ok_or_else(wrong)?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return Err(wrong());
    }
    // At most eight digits.
    let number = digits.iter().fold(0, |number, digit| number * 10 + u64::from(digit - b'0'));
    match unit {
        b'H' => Ok(number * 3_600_000_000),
        b'M' => Ok(number * 60_000_000),
        b'S' => Ok(number * 1_000_000),
        b'm' => Ok(number * 1_000),
        b'u' => Ok(number),
        b'n' => Ok(number / 1_000),
        _ => Err(wrong()),
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_are_read() {
        let read = |text: &str| timeout_us(text.as_bytes()).ok();
        assert_eq!(read("20m"), Some(20_000));
        assert_eq!(read("99999999H"), Some(99_999_999 * 3_600_000_000));
        assert_eq!(read("1500n"), Some(1));
        for wrong in ["", "m", "20", "123456789u", "1.5S", "-1S"] {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
    }
}
