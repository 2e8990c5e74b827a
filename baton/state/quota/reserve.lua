-- Reserves what a claim needs in all its buckets, or nothing in any.
--
-- ARGV: prefix, member, owner, who, prices, input, output, lease, kept, windows, flows, then for each window
-- name start end limits of requests, input, output, both, and the limit to warn of; for each flow
-- name concurrency burst interval. -1: no limit. Times are microseconds, `kept` milliseconds.
--
-- Answers {status, now, requests, input, output, counters...}: what would be or was debited and the counters before it,
-- six a window and two a flow. Status: granted, taken (an open reservation of the same request and size), refused,
-- in_use (another size), elsewhen (the windows do not hold the server's time).

local member, owner, who, prices = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local input, output, lease, kept = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[9]
local windows, flows = tonumber(ARGV[10]), tonumber(ARGV[11])
local FIRST, WINDOW, FLOW, DUE = 12, 8, 4, 16
local flows_from = FIRST + windows * WINDOW

for row = FIRST, flows_from - 1, WINDOW do
  if now < tonumber(ARGV[row + 1]) or now >= tonumber(ARGV[row + 2]) then
    return { 'elsewhen', now }
  end
end
expire_due(DUE)

local key, size = prefix .. 'r:' .. member, ARGV[6] .. ' ' .. ARGV[7]
local known = redis.call('HMGET', key, 'state', 'size', 'charged', 'owner')
local cost, charged = { 1, input, output }, '0 0 0 0 0'
local is_open = known[1] == 'open'
if is_open then
  if known[2] ~= size then
    return { 'in_use', now }
  end
  cost = { 0, 0, 0 }
elseif known[1] and known[2] == size then
  charged = known[3]
  local before = numbers(charged)
  cost = { above(1, before[1]), above(input, before[2]), above(output, before[4]) }
end

local reply = { 'granted', now, cost[1], cost[2], cost[3] }
local is_refused, exhausted, is_new = false, {}, {}

local function breaks(limit, counted, asked)
  return limit >= 0 and asked > 0 and counted + asked > limit
end

for row = FIRST, flows_from - 1, WINDOW do
  local v = redis.call('HMGET', prefix .. ARGV[row], 'ru', 'rr', 'iu', 'ir', 'ou', 'or', 'al')
  local sums = {}
  is_new[#is_new + 1] = not v[1]
  for position = 1, 6 do
    local number = tonumber(v[position] or 0)
    sums[position] = number
    reply[#reply + 1] = number
  end
  local inputs, outputs = sums[3] + sums[4], sums[5] + sums[6]
  if breaks(tonumber(ARGV[row + 3]), sums[1] + sums[2], cost[1])
    or breaks(tonumber(ARGV[row + 4]), inputs, cost[2])
    or breaks(tonumber(ARGV[row + 5]), outputs, cost[3])
    or breaks(tonumber(ARGV[row + 6]), inputs + outputs, cost[2] + cost[3]) then
    is_refused = true
    if tonumber(ARGV[row + 7]) > 0 and tonumber(v[7] or 0) < 100 and v[1] then
      exhausted[#exhausted + 1] = { ARGV[row], tonumber(ARGV[row + 7]), sums[3] + sums[5] }
    end
  end
end

local arrivals = {}
for row = flows_from, flows_from + (flows - 1) * FLOW, FLOW do
  local v = redis.call('HMGET', prefix .. ARGV[row], 'running', 'arrival')
  local running, arrival = tonumber(v[1] or 0), tonumber(v[2] or 0)
  reply[#reply + 1], reply[#reply + 2] = running, arrival
  local limit, burst, interval = tonumber(ARGV[row + 1]), tonumber(ARGV[row + 2]), tonumber(ARGV[row + 3])
  if limit >= 0 and running + 1 > limit then
    is_refused = true
  end
  if interval > 0 then
    arrival = math.max(now, arrival) + cost[1] * interval
    if burst >= 0 and cost[1] > 0 and arrival - now > burst * interval then
      is_refused = true
    end
  end
  arrivals[#arrivals + 1] = { ARGV[row], running, arrival, v[1] }
end

if is_open then
  redis.call('SET', prefix .. 'd:' .. member .. '\n' .. known[4], 'superseded', 'PX', kept)
  redis.call('HSET', key, 'owner', owner)
  redis.call('ZADD', prefix .. 'open', int(now + lease), member)
  reply[1] = 'taken'
  return reply
end
if is_refused then
  for _, full in ipairs(exhausted) do
    redis.call('HSET', prefix .. full[1], 'al', 100)
    redis.call('XADD', prefix .. 'alerts', 'MAXLEN', '~', ALERTS_KEPT, '*',
      'bucket', full[1], 'percent', 100, 'limit', int(full[2]), 'used', int(full[3]))
  end
  reply[1] = 'refused'
  return reply
end

local names, at = {}, 6
for row = FIRST, flows_from - 1, WINDOW do
  local window = prefix .. ARGV[row]
  names[#names + 1] = ARGV[row]
  if is_new[#names] then
    open_window(ARGV[row], ARGV[row + 2])
  end
  redis.call('HSET', window, 'rr', int(reply[at + 1] + cost[1]), 'ir', int(reply[at + 3] + cost[2]),
    'or', int(reply[at + 5] + cost[3]), 'lt', ARGV[row + 7])
  at = at + 6
end
local flow_names = {}
for _, flow in ipairs(arrivals) do
  flow_names[#flow_names + 1] = flow[1]
  redis.call('HSET', prefix .. flow[1], 'running', int(flow[2] + 1), 'arrival', int(flow[3]))
  if flow[4] and flow[2] == 0 then
    redis.call('PERSIST', prefix .. flow[1])
  end
end
if known[1] then
  redis.call('SET', prefix .. 'd:' .. member .. '\n' .. known[4], 'superseded', 'PX', kept)
  redis.call('DEL', key)
end
redis.call('HSET', key, 'state', 'open', 'owner', owner, 'who', who, 'at', int(now), 'size', size,
  'held', int(cost[1]) .. ' ' .. int(cost[2]) .. ' ' .. int(cost[3]), 'charged', charged, 'progress', '0 0 0',
  'prices', prices, 'windows', table.concat(names, '\n'), 'flows', table.concat(flow_names, '\n'))
redis.call('ZADD', prefix .. 'open', int(now + lease), member)
return reply
