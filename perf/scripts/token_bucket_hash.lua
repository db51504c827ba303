-- The token bucket that people usually write, and write well: level and time in a hash, floating point, Redis's own
-- time, expiry when full. `lua/token_bucket.lua` is measured against it (`perf/compare script`); nothing else uses it.
--
--   EVALSHA sha 1 key capacity refill period_ms cost writes  →  granted, remaining, retry_after_ms, reset_after_ms
--
-- writes: `always`, as most of them do, or `taken`: only when something was taken, which is as right and costs less.
local key = KEYS[1]
local capacity, refill = tonumber(ARGV[1]), tonumber(ARGV[2])
local period_ms, cost = tonumber(ARGV[3]), tonumber(ARGV[4])

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + time[2] / 1000
local rate = refill / period_ms

local stored = redis.call('HMGET', key, 'tokens', 'at_ms')
local tokens, at_ms = tonumber(stored[1]), tonumber(stored[2])
if tokens and at_ms then
    tokens = math.min(capacity, tokens + math.max(0, now_ms - at_ms) * rate)
else
    tokens = capacity
end

local granted, retry_after_ms = 0, 0
if tokens >= cost then
    granted = cost
    tokens = tokens - cost
else
    retry_after_ms = math.ceil((cost - tokens) / rate)
end
local reset_after_ms = math.ceil((capacity - tokens) / rate)
if granted > 0 or ARGV[5] == 'always' then
    redis.call('HSET', key, 'tokens', tokens, 'at_ms', now_ms)
    redis.call('PEXPIRE', key, reset_after_ms)
end
return {granted, math.floor(tokens), retry_after_ms, reset_after_ms}
