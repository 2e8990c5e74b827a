-- Reserves what a claim needs in all its buckets, or nothing in any.
--
-- ARGV: prefix, member, owner, who, prices, input, output, lease (microseconds), kept (milliseconds), drawn, plan. The
-- plan is a JSON list of numbers: how many windows there are, their starts and ends, then, in the order of `drawn`, for a
-- window its end, its limit of tokens and the limit to warn of, and of a minute those of requests, input and output, too;
-- for a flow concurrency, burst and the burst's interval. -1: no limit.
--
-- Answers {status, now, cost, counters...}: what would be or was debited, and the fields' values before, in the order of
-- `drawn`. Status: granted, taken (an open reservation of the same request and size), refused, in_use (of another size),
-- elsewhen (the windows do not hold the server's time).

local member, owner, kept = ARGV[2], ARGV[3], ARGV[9]
local input, output, lease = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local drawn, plan = ARGV[10], cjson.decode(ARGV[11])
local DUE = 16

local at = timely(plan)
if not at then
  return { 'elsewhen', now }
end
expire_due(DUE)

local record, size = prefix .. 'r:' .. member, ARGV[6] .. ' ' .. ARGV[7]
local known = redis.call('HMGET', record, 'state', 'size', 'charged', 'owner')
local requests, charged = 1, '0 0 0 0 0 0'
local is_open = known[1] == 'open'
if is_open then
  if known[2] ~= size then
    return { 'in_use', now }
  end
  requests, input, output = 0, 0, 0
elseif known[1] and known[2] == size then
  charged = known[3]
  local before = numbers(charged)
  requests, input, output = above(1, before[1]), above(input, before[2]), above(output, before[4])
end
local tokens = input + output

local reply = { 'granted', now, requests .. ' ' .. input .. ' ' .. output }
local is_refused, exhausted, scopes = false, {}, scopes_of(drawn)

-- The counters of a window with the claim in it; whether a limit breaks and what opens is noted.
local function window(scope, field, value)
  local ru, rr, iu, ir, ou, oh, al = 0, 0, 0, 0, 0, 0, '0'
  if value then
    local lt
    ru, rr, iu, ir, ou, oh, lt, al = string.match(value, COUNTERS)
  else
    scope.opens = true
  end
  local ends, limit, warn = plan[at + 1], plan[at + 2], plan[at + 3]
  scope.ends = scope.ends > ends and scope.ends or ends
  ir, oh = ir + input, oh + output
  if limit >= 0 and tokens > 0 and iu + ir + ou + oh > limit then
    is_refused = true
    if value and warn > 0 and tonumber(al) < 100 then
      exhausted[#exhausted + 1] = { scope, field, value, warn, iu + ou }
    end
  end
  at = at + 3
  if string.sub(field, 1, 3) == 'min' then
    local most_requests, most_input, most_output = plan[at + 1], plan[at + 2], plan[at + 3]
    if most_requests >= 0 and requests > 0 and ru + rr + requests > most_requests
      or most_input >= 0 and input > 0 and iu + ir > most_input
      or most_output >= 0 and output > 0 and ou + oh > most_output then
      is_refused = true
    end
    at = at + 3
  end
  return ru .. ' ' .. rr + requests .. ' ' .. iu .. ' ' .. ir .. ' ' .. ou .. ' ' .. oh .. ' ' .. warn .. ' ' .. al
end

local function flow(value)
  local running, arrival = 0, 0
  if value then
    running, arrival = string.match(value, '^(%d+) (%d+)$')
  end
  running, arrival = running + 1, tonumber(arrival)
  local limit, burst, interval = plan[at + 1], plan[at + 2], plan[at + 3]
  if limit >= 0 and running > limit then
    is_refused = true
  end
  if interval > 0 then
    arrival = math.max(now, arrival) + requests * interval
    if burst >= 0 and requests > 0 and arrival - now > burst * interval then
      is_refused = true
    end
  end
  at = at + 3
  return running .. ' ' .. int(arrival)
end

for _, scope in ipairs(scopes) do
  local fields, changed = scope[2], {}
  scope.ends = 0
  local values = redis.call('HMGET', scope[1], unpack(fields))
  for position, field in ipairs(fields) do
    local value = values[position]
    reply[#reply + 1] = value or ''
    changed[#changed + 1] = field
    changed[#changed + 1] = field == 'flow' and flow(value) or window(scope, field, value)
  end
  scope.changed = changed
end

if is_open then
  redis.call('SET', prefix .. 'd:' .. member .. '\n' .. known[4], 'superseded', 'PX', kept)
  redis.call('HSET', record, 'owner', owner)
  redis.call('ZADD', prefix .. 'open', int(now + lease), member)
  reply[1] = 'taken'
  return reply
end
if is_refused then
  for _, full in ipairs(exhausted) do
    redis.call('HSET', full[1][1], full[2], (string.gsub(full[3], '%d+$', '100')))
    alert(full[2], full[1][3], 100, full[4], full[5])
  end
  reply[1] = 'refused'
  return reply
end

for _, scope in ipairs(scopes) do
  redis.call('HSET', scope[1], unpack(scope.changed))
  if scope.opens then
    turn(scope[1], scope.ends)
  elseif scope.ends == 0 then
    redis.call('PEXPIRE', scope[1], FLOW_KEPT)
  end
end
if known[1] then
  redis.call('SET', prefix .. 'd:' .. member .. '\n' .. known[4], 'superseded', 'PX', kept)
  redis.call('DEL', record)
end
redis.call('HSET', record, 'state', 'open', 'owner', owner, 'who', ARGV[4], 'at', int(now), 'size', size,
  'held', reply[3], 'charged', charged, 'progress', '0 0 0 0', 'prices', ARGV[5], 'drawn', drawn)
redis.call('ZADD', prefix .. 'open', int(now + lease), member)
return reply
