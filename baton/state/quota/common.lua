-- The beginning of every quota script. All keys of an organisation have its hash tag and so one slot; KEYS[1] routes the
-- call there, the others are made from the prefix, because leases that end are found here and not by the caller.
--
-- <prefix>open          sorted set: open reservations by the end of their lease (microseconds)
-- <prefix>r:<member>    one reservation; member is tenant/request id
-- <prefix>d:<member>\n<owner>   this admission is settled or superseded: it cannot be charged again
-- <prefix><window>      counters: ru rr iu ir ou or (requests, input, output; used, reserved), lt the limit to warn of (-1: none),
--                       al the highest percentage warned of
-- <prefix><flow>        running, arrival (of the burst)
-- <prefix>ledger, <prefix>alerts   streams
--
-- Numbers are whole and below 2^53, so Lua's doubles hold them exactly.

local prefix = ARGV[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

local WINDOW_KEPT = 120000 -- milliseconds after its end: refunds and readers that come late
local EXPIRED_KEPT = 86400000 -- milliseconds: a settlement that comes after the lease charges only the rest
local ALERTS_KEPT = 10000

local function int(number)
  return string.format('%.0f', number)
end

local function numbers(text)
  local found = {}
  for word in string.gmatch(text, '%d+') do
    found[#found + 1] = tonumber(word)
  end
  return found
end

local function above(more, less)
  if more > less then
    return more - less
  end
  return 0
end

local function open_window(name, ends)
  local key = prefix .. name
  redis.call('HSET', key, 'ru', 0, 'rr', 0, 'iu', 0, 'ir', 0, 'ou', 0, 'or', 0)
  redis.call('PEXPIREAT', key, int(math.floor(ends / 1000) + WINDOW_KEPT))
end

local function warn(name, used, limit, warned)
  local percent = 0
  for _, step in ipairs({ 50, 80, 100 }) do
    if used * 100 >= limit * step then
      percent = step
    end
  end
  if percent > warned then
    redis.call('HSET', prefix .. name, 'al', percent)
    redis.call('XADD', prefix .. 'alerts', 'MAXLEN', '~', ALERTS_KEPT, '*',
      'bucket', name, 'percent', percent, 'limit', int(limit), 'used', int(used))
  end
end

-- Moves what was held in a window to what was used. A window that is gone needs neither.
local function move(name, held, used)
  local key = prefix .. name
  local v = redis.call('HMGET', key, 'ru', 'rr', 'iu', 'ir', 'ou', 'or', 'lt', 'al')
  if not v[1] then
    return
  end
  local input, output = v[3] + used[2], v[5] + used[3]
  redis.call('HSET', key,
    'ru', int(v[1] + used[1]), 'rr', int(v[2] - held[1]),
    'iu', int(input), 'ir', int(v[4] - held[2]),
    'ou', int(output), 'or', int(v[6] - held[3]))
  local limit = tonumber(v[7])
  if limit > 0 then
    warn(name, input + output, limit, tonumber(v[8] or 0))
  end
end

local function leave(name)
  local key = prefix .. name
  local running = redis.call('HGET', key, 'running')
  if not running then
    return
  end
  running = above(tonumber(running), 1)
  redis.call('HSET', key, 'running', int(running))
  if running == 0 then
    redis.call('PEXPIRE', key, WINDOW_KEPT)
  end
end

-- One line of the ledger: who is "tenant\nkey\nmodel", used is {requests, input, cached, output, cost, energy}.
local function book(reason, request, who, at, used)
  local tenant, key, model = string.match(who, '^(.-)\n(.-)\n(.*)$')
  redis.call('XADD', prefix .. 'ledger', '*', 'at', at, 'reason', reason, 'request', request,
    'tenant', tenant, 'key', key, 'model', model, 'requests', int(used[1]), 'input', int(used[2]),
    'cached', int(used[3]), 'output', int(used[4]), 'cost', int(used[5]), 'energy', int(used[6]))
end

local function request_of(member)
  return string.match(member, '^[^/]*/(.*)$')
end

local FIELDS = { 'state', 'owner', 'who', 'at', 'held', 'charged', 'windows', 'flows', 'progress', 'prices' }

local function read(member)
  return redis.call('HMGET', prefix .. 'r:' .. member, unpack(FIELDS))
end

-- Ends a reservation: refunds what it held, charges what `total` has more than was charged before.
local function close(member, record, total, reason)
  local before, used = numbers(record[6]), {}
  for position = 1, 5 do
    used[position] = above(total[position], before[position])
  end
  used[6] = total[6]
  local held = numbers(record[5])
  local charge = { used[1], used[2], used[4] }
  for name in string.gmatch(record[7], '[^\n]+') do
    move(name, held, charge)
  end
  if record[1] == 'open' then
    for name in string.gmatch(record[8], '[^\n]+') do
      leave(name)
    end
    redis.call('ZREM', prefix .. 'open', member)
  end
  if used[1] + used[2] + used[4] + used[5] > 0 then
    book(reason, request_of(member), record[3], record[4], used)
  end
end

-- Charges a reservation whose lease has ended for what its gateway last told of it.
local function expire(member)
  local record = read(member)
  if record[1] ~= 'open' then
    redis.call('ZREM', prefix .. 'open', member)
    return
  end
  local p, price = numbers(record[9]), numbers(record[10])
  local cost = (p[1] - p[2]) * price[1] + p[2] * price[2] + p[3] * price[3]
  close(member, record, { 1, p[1], p[2], p[3], cost, 0 }, 'expired')
  local before = numbers(record[6])
  local charged = { math.max(1, before[1]), math.max(p[1], before[2]), math.max(p[2], before[3]),
    math.max(p[3], before[4]), math.max(cost, before[5]) }
  for position = 1, 5 do
    charged[position] = int(charged[position])
  end
  local key = prefix .. 'r:' .. member
  redis.call('HSET', key, 'state', 'expired', 'held', '0 0 0', 'charged', table.concat(charged, ' '))
  redis.call('PEXPIRE', key, EXPIRED_KEPT)
end

local function expire_due(most)
  local due = redis.call('ZRANGEBYSCORE', prefix .. 'open', '-inf', int(now), 'LIMIT', 0, most)
  for _, member in ipairs(due) do
    expire(member)
  end
  return #due
end
