-- Token buckets: takes from, gives back to or looks at one bucket or several, in one atomic step.
--
--   EVALSHA sha N key … mode  then for each key: capacity refill period_ms cost
--
-- KEYS  one bucket each, all different, all with one hash tag. No other key is touched.
-- mode  how to take:
--         exact  all or nothing over all KEYS: every bucket gives its cost, or none gives anything
--         each   every bucket for itself, all or nothing
--         upto   the most, up to the cost, that every bucket can give is taken from every bucket; one cost for all
--         back   gives back: adds the cost, up to the capacity
-- capacity, refill 1 to 2^31-1; period_ms 1 to 31 days; cost 0 to 2^52, and 0 only looks.
--
-- Reply: an array of four integers for each key, in the order of KEYS:
--   granted         what was taken from this bucket (back: what really went back)
--   remaining       whole tokens it holds now
--   retry_after_ms  0: it gave the cost, or would have (so in a denied `exact`, those that are not 0 denied it).
--                   -1: never, the cost is above the capacity. Otherwise milliseconds from now until it holds the
--                   cost, rounded up; after an `upto` that took a part, until it holds the whole cost again. back: 0
--   reset_after_ms  milliseconds until it is full, rounded up
-- Waits above 2^52 ms (142,000 years) are reported as 2^52.
--
-- A bucket starts full and refills continuously: `refill` tokens in `period_ms`, up to `capacity`. It holds whole
-- tokens and a fraction, counted in units of 1/period_ms of a token. A millisecond brings exactly `refill` units, so
-- nothing is ever rounded away, whoever looks and however often. The time is Redis's own, in milliseconds.
--
-- The limit travels on every call, and the bucket remembers that of its last write. Up to the call that brings another
-- limit, time counts at the old one; from then on at the new one. A lower capacity caps the bucket, a raised one gives
-- nothing at once, and the fraction is rescaled to the new period, rounding down.
--
-- Value, 27 bytes, most significant byte first:
--   version 1 (= 1) · at_ms 6 · tokens 4 · fraction 4 · capacity 4 · refill 4 · period_ms 4
-- `tokens` and `fraction` are what it held at `at_ms`; the limit is the one in force then. Anything else under the key,
-- another type too, counts as no bucket, and the next take writes over it: wrong for once rather than broken for ever.
--
-- A key expires when its bucket is full again, and a full bucket is not stored: no key means full, at the capacity of
-- the call. A deny and a look write nothing, with two exceptions that would otherwise cheat or freeze the bucket:
--   * the limit changed: the key would expire when the old limit was full;
--   * the clock went back (a promoted replica's): that counts as no time passed, and the bucket goes on from there.
--
-- Malformed arguments get `ERR token_bucket: …` and change nothing. What Redis itself refuses (OOM, READONLY), it
-- refuses at the first write, so no call is ever half done.
--
-- Numbers are doubles: whole numbers are exact up to 2^53. Lua computes `a % b` as a - floor(a / b) * b, and the floor
-- of the rounded quotient is the true one as long as |a| + b <= 2^53. Dividends are kept below 2^52 + 2^32 and divisors
-- below 2^32 to stay within that; what may be larger goes through `mul_div`. Each place says why its numbers fit.
--
-- Needs Redis 6.2 or later, and runs TIME, GET (MGET for several keys), SET and DEL. As a function (Redis 7), the same
-- text is wrapped by whoever loads it, and then called as FCALL token_bucket N key … mode …:
--
--   #!lua name=sluice
--   redis.register_function('token_bucket', function(KEYS, ARGV)
--   <this file>
--   end)

local mode = ARGV[1]
local now_ms

-- The usual call on its own: one key, taking, the limit of the last write, no number that needs care. It spares the
-- closures and tables of the long way below, a quarter of the call's instructions. Whatever is unusual falls through to
-- the long way, which is complete without this, and nothing has been written by then.
if #KEYS == 1 and #ARGV == 5 and (mode == 'exact' or mode == 'each' or mode == 'upto') then
    -- `+ 0` reads a number in half the time of `tonumber`, but raises an error where there is none. Then the long way
    -- says what is wrong.
    local numbers, capacity, refill, period, cost = pcall(function()
        return ARGV[2] + 0, ARGV[3] + 0, ARGV[4] + 0, ARGV[5] + 0
    end)
    -- 2^31 - 1, 31 days and 2^52 as below. A NaN fails every comparison.
    if numbers and capacity >= 1 and capacity <= 2147483647 and refill >= 1 and refill <= 2147483647
        and period >= 1 and period <= 2678400000 and cost >= 0 and cost <= capacity
        and capacity * period <= 4503599627370496 and capacity % 1 + refill % 1 + period % 1 + cost % 1 == 0 then
        local key = KEYS[1]
        local time = redis.call('TIME')
        local micros = time[1] * 1000000 + time[2] -- below 2^53 until the year 2255
        now_ms = (micros - micros % 1000) / 1000
        local value = redis.pcall('GET', key)
        local tokens, fraction, usual = capacity, 0, not value
        if value and #value == 27 then
            local version, at_ms, old_tokens, old_fraction, old_capacity, old_refill, old_period
                = struct.unpack('>I1I6I4I4I4I4I4', value)
            local elapsed_ms = now_ms - at_ms
            local units = elapsed_ms * refill + old_fraction -- exact if it is at most 2^52, as a rounded one is not
            usual = version == 1 and old_capacity == capacity and old_refill == refill and old_period == period
                and elapsed_ms >= 0 and units <= 4503599627370496 and old_tokens <= capacity and old_fraction < period
            if usual then
                fraction = units % period
                tokens = old_tokens + (units - fraction) / period
                if tokens >= capacity then
                    tokens, fraction = capacity, 0
                end
            end
        end
        if usual then
            local granted, retry_ms = cost, 0
            if tokens >= cost then
                tokens = tokens - cost
            else
                granted = 0
                if mode == 'upto' then
                    granted, tokens = tokens, 0
                end
                -- ceil(units / refill); units are at most capacity * period, which is at most 2^52
                local units = (cost - tokens) * period - fraction
                retry_ms = (units + -units % refill) / refill
            end
            local units = (capacity - tokens) * period - fraction
            local reset_ms = (units + -units % refill) / refill
            if granted > 0 then
                redis.call('SET', key, struct.pack('>I1I6I4I4I4I4I4', 1, now_ms, tokens, fraction, capacity, refill,
                    period), 'PXAT', string.format('%d', now_ms + reset_ms))
            end
            return {granted, tokens, retry_ms, reset_ms}
        end
    end
end

local INTEGER_MAX = 2147483647 -- 2^31 - 1, of capacity and refill
local PERIOD_MS_MAX = 2678400000 -- 31 days, below 2^32
local EXACT_MAX = 4503599627370496 -- 2^52: far enough below 2^53 for a sum and a division
local VALUE_BYTES = 27
local VALUE = '>I1I6I4I4I4I4I4'

-- floor((a * b + c) / d) and the rest, for 0 <= a < d < 2^32, 0 <= b < 2^32, |c| < 2^32: in two steps of 16 bits.
-- a * high is below 2^48; rest * 2^16 and a * low are too, so the sum is below 2^50.
local function mul_div(a, b, c, d)
    local low = b % 65536
    local first = a * ((b - low) / 65536)
    local rest = first % d
    local second = rest * 65536 + a * low + c
    local left = second % d
    return (first - rest) / d * 65536 + (second - left) / d, left
end

-- Milliseconds until a bucket has so many more whole tokens: ceil((tokens * period - fraction) / refill).
local function wait_ms(tokens, fraction, refill, period)
    local units = tokens * period
    if units <= EXACT_MAX then
        units = units - fraction
        return (units + -units % refill) / refill
    end
    -- Too large, and so rounded. With period = whole * refill + part, the wait is tokens * whole and a mul_div whose
    -- result is at most tokens + 1, below 2^32. If the sum is not exact, it is above EXACT_MAX however it was rounded.
    local part = period % refill
    local more = mul_div(part, tokens, refill - 1 - fraction, refill)
    local wait = tokens * ((period - part) / refill) + more
    return wait < EXACT_MAX and wait or EXACT_MAX
end

-- What a stored bucket holds now at this limit: tokens, fraction, and whether it must be written whatever happens.
local function level(value, now_ms, capacity, refill, period)
    if not value or #value ~= VALUE_BYTES then
        return capacity, 0, false
    end
    local version, at_ms, tokens, fraction, old_capacity, old_refill, old_period = struct.unpack(VALUE, value)
    local changed = old_capacity ~= capacity or old_refill ~= refill or old_period ~= period
    if version ~= 1 or tokens > old_capacity or fraction >= old_period or (changed and (old_capacity > INTEGER_MAX
            or old_refill < 1 or old_refill > INTEGER_MAX or old_period > PERIOD_MS_MAX)) then
        return capacity, 0, false
    end
    -- The time that passed brings tokens at the limit that was in force. Times have 48 bits.
    local elapsed_ms = now_ms - at_ms
    if elapsed_ms > 0 then
        local units = elapsed_ms * old_refill
        if units <= EXACT_MAX then
            units = units + fraction
            fraction = units % old_period
            tokens = tokens + (units - fraction) / old_period
        else
            -- Too large, and so rounded. Whole periods bring `refill` each. Where that product is not exact, it is far
            -- above any capacity, which ends it; otherwise what is left of a period brings less than `refill` more.
            local part_ms = elapsed_ms % old_period
            tokens = tokens + (elapsed_ms - part_ms) / old_period * old_refill
            if tokens < old_capacity then
                local more
                more, fraction = mul_div(part_ms, old_refill, fraction, old_period)
                tokens = tokens + more
            end
        end
        if tokens >= old_capacity then
            tokens, fraction = old_capacity, 0
        end
    end
    if changed then
        if tokens >= capacity then
            tokens, fraction = capacity, 0
        elseif old_period ~= period then
            fraction = mul_div(fraction, period, 0, old_period)
        end
    end
    return tokens, fraction, changed or elapsed_ms < 0
end

-- The limit and the cost of the bucket whose arguments follow ARGV[last]; nothing if they are malformed. A NaN fails
-- every comparison.
local function arguments(last)
    local capacity, refill = tonumber(ARGV[last + 1]), tonumber(ARGV[last + 2])
    local period, cost = tonumber(ARGV[last + 3]), tonumber(ARGV[last + 4])
    if capacity and refill and period and cost and capacity >= 1 and capacity <= INTEGER_MAX and refill >= 1
        and refill <= INTEGER_MAX and period >= 1 and period <= PERIOD_MS_MAX and cost >= 0 and cost <= EXACT_MAX
        and capacity % 1 + refill % 1 + period % 1 + cost % 1 == 0 then
        return capacity, refill, period, cost
    end
end

local function malformed(key)
    return redis.error_reply('ERR token_bucket: key ' .. key .. ' needs whole numbers: capacity and refill from 1 to '
        .. '2147483647, period_ms from 1 to 2678400000, cost from 0 to 4503599627370496')
end

local count = #KEYS
if mode ~= 'exact' and mode ~= 'each' and mode ~= 'upto' and mode ~= 'back' then
    return redis.error_reply('ERR token_bucket: the mode must be exact, each, upto or back')
end
if count == 0 or count > 1000 then
    return redis.error_reply('ERR token_bucket: from 1 to 1000 keys')
end
if #ARGV ~= 1 + 4 * count then
    return redis.error_reply('ERR token_bucket: after the mode, capacity refill period_ms cost for each key')
end

if not now_ms then
    local time = redis.call('TIME')
    local micros = time[1] * 1000000 + time[2]
    now_ms = (micros - micros % 1000) / 1000
end
local reply = {}

-- Carries out what was decided for one bucket: writes it if anything changed, and adds its four integers to the reply.
local function settle(key, capacity, refill, period, cost, tokens, fraction, must_write, granted)
    local retry_ms = 0
    if mode == 'back' then
        tokens = tokens + granted
        if tokens == capacity then
            fraction = 0
        end
    else
        local short = tokens < cost
        tokens = tokens - granted
        if short then
            retry_ms = cost > capacity and -1 or wait_ms(cost - tokens, fraction, refill, period)
        end
    end
    local reset_ms = tokens < capacity and wait_ms(capacity - tokens, fraction, refill, period) or 0
    if granted > 0 or must_write then
        if reset_ms > 0 then
            local value = struct.pack(VALUE, 1, now_ms, tokens, fraction, capacity, refill, period)
            redis.call('SET', key, value, 'PXAT', string.format('%d', now_ms + reset_ms))
        else
            redis.call('DEL', key)
        end
    end
    local last = #reply
    reply[last + 1], reply[last + 2], reply[last + 3], reply[last + 4] = granted, tokens, retry_ms, reset_ms
end

-- Several buckets: look at all of them, then decide, then write. Each has seven places in `buckets`: its four arguments
-- and what `level` says.
local buckets = {}
local least, all_give = EXACT_MAX, true
local values = redis.call('MGET', unpack(KEYS))
for index = 1, count do
    local capacity, refill, period, cost = arguments(4 * index - 3)
    if not capacity then
        return malformed(index)
    end
    if mode == 'upto' and cost ~= tonumber(ARGV[5]) then
        return redis.error_reply('ERR token_bucket: upto takes the same from every key, so the costs must be equal')
    end
    local tokens, fraction, must_write = level(values[index], now_ms, capacity, refill, period)
    least = tokens < least and tokens or least
    all_give = all_give and tokens >= cost
    local last = 7 * index - 7
    buckets[last + 1], buckets[last + 2], buckets[last + 3], buckets[last + 4] = capacity, refill, period, cost
    buckets[last + 5], buckets[last + 6], buckets[last + 7] = tokens, fraction, must_write
end
for index = 1, count do
    local capacity, refill, period, cost, tokens, fraction, must_write = unpack(buckets, 7 * index - 6, 7 * index)
    local granted = cost
    if mode == 'back' then
        granted = cost < capacity - tokens and cost or capacity - tokens
    elseif mode == 'upto' then
        granted = cost < least and cost or least
    elseif (mode == 'exact' and not all_give) or tokens < cost then
        granted = 0
    end
    settle(KEYS[index], capacity, refill, period, cost, tokens, fraction, must_write, granted)
end
return reply
