-- The beginning of every quota script. All keys of an organisation have its hash tag and so one slot; KEYS[1] routes the
-- call there, the others are made from the prefix, because leases that end are found here and not by the caller.
--
-- <prefix>open      sorted set: open reservations by the end of their lease (microseconds)
-- <prefix>r:<member>            one reservation; member is tenant/request id
-- <prefix>d:<member>\n<owner>   this admission is settled or superseded: it cannot be charged again
-- <prefix><scope>   hash: a field for each window, named by its kind and start, "ru rr iu ir ou or lt al": requests, input
--                   and output tokens, each used and reserved, the limit to warn of (-1: none) and the highest percentage
--                   warned of; and the field flow, "running arrival", the latter that of the burst
-- <prefix>ledger, <prefix>alerts   streams
--
-- What a claim draws on is told in JSON, [[scope, [field, ...]], ...], which is parsed faster than any text of our own:
-- a script holds up the server, so it makes few calls and few strings.
-- Numbers are whole and below 2^53, so Lua's doubles hold them; `..` writes 14 digits, enough for counts, int() all.

local prefix = ARGV[1]
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

local WINDOW_KEPT = 120000 -- milliseconds after its end: refunds and readers that come late
local KEPT = { minute = 180, day = 108000, month = 2851200 } -- seconds after its start, no less than that
local FLOW_KEPT = 86400000 -- milliseconds after a claim: what it counts must outlive it
local EXPIRED_KEPT = 86400000 -- milliseconds: a settlement that comes after the lease charges only the rest
local ALERTS_KEPT = 10000
local CHARGE = 6 -- requests, input, cached, output, cost, energy: what a charge counts, in this order
local COUNTERS = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%-?%d+) (%d+)$'

local function int(number)
  return string.format('%.0f', number)
end

local function numbers(text)
  local found, count = {}, 0
  for word in string.gmatch(text, '%-?%d+') do
    count = count + 1
    found[count] = tonumber(word)
  end
  return found
end

local function above(more, less)
  if more > less then
    return more - less
  end
  return 0
end

-- The scopes of what is drawn on: {key, fields, name}.
local function scopes_of(drawn)
  local found = cjson.decode(drawn)
  for position, scope in ipairs(found) do
    found[position] = { prefix .. scope[1], scope[2], scope[1] }
  end
  return found
end

-- After a new window was written: the scope lives until its last window has ended, longer than any request in progress,
-- and forgets windows that are long over.
local function turn(key, ends)
  redis.call('PEXPIREAT', key, int(math.floor(math.max(ends / 1000 + WINDOW_KEPT, now / 1000 + FLOW_KEPT))))
  for _, field in ipairs(redis.call('HKEYS', key)) do
    local kind, start = string.match(field, '^(%a+):(%d+)$')
    if kind and start + KEPT[kind] < now / 1000000 then
      redis.call('HDEL', key, field)
    end
  end
end

local function alert(field, scope, percent, limit, used)
  redis.call('XADD', prefix .. 'alerts', 'MAXLEN', '~', ALERTS_KEPT, '*',
    'bucket', field .. ':' .. scope, 'percent', percent, 'limit', int(limit), 'used', int(used))
end

-- The percentage warned of by now; tells when it is a new one.
local function warned(field, scope, used, limit, before)
  local percent = 0
  if limit > 0 and used * 2 >= limit then
    percent = used >= limit and 100 or used * 100 >= limit * 80 and 80 or 50
  end
  if percent <= before then
    return before
  end
  alert(field, scope, percent, limit, used)
  return percent
end

-- Moves what was held to what was used, in every window that is still there; a request in progress less if it leaves.
-- Counters that were evicted and begun anew do not know what is given back to them; they stop at 0.
local function move(drawn, held, used, leaves)
  for _, scope in ipairs(scopes_of(drawn)) do
    local key, fields, name = scope[1], scope[2], scope[3]
    local values, changed = redis.call('HMGET', key, unpack(fields)), {}
    for position, field in ipairs(fields) do
      local value, after = values[position], nil
      if value and field == 'flow' then
        local running, arrival = string.match(value, '^(%d+) (%d+)$')
        after = leaves and above(tonumber(running), 1) .. ' ' .. arrival
      elseif value then
        local ru, rr, iu, ir, ou, oh, lt, al = string.match(value, COUNTERS)
        local input, output = iu + used[2], ou + used[3]
        al = warned(field, name, input + output, tonumber(lt), tonumber(al))
        after = ru + used[1] .. ' ' .. above(tonumber(rr), held[1]) .. ' ' .. input .. ' '
          .. above(tonumber(ir), held[2]) .. ' ' .. output .. ' ' .. above(tonumber(oh), held[3]) .. ' ' .. lt .. ' ' .. al
      end
      if after then
        changed[#changed + 1] = field
        changed[#changed + 1] = after
      end
    end
    if #changed > 0 then
      redis.call('HSET', key, unpack(changed))
    end
  end
end

-- One line of the ledger: who is "tenant\nkey\nmodel", used is {requests, input, cached, output, cost, energy}.
local function book(reason, member, who, at, used)
  local tenant, key, model = string.match(who, '^(.-)\n(.-)\n(.*)$')
  redis.call('XADD', prefix .. 'ledger', '*', 'at', at, 'reason', reason,
    'request', string.match(member, '^[^/]*/(.*)$'), 'tenant', tenant, 'key', key, 'model', model,
    'requests', used[1], 'input', int(used[2]), 'cached', int(used[3]), 'output', int(used[4]),
    'cost', int(used[5]), 'energy', int(used[6]))
end

local function read(member)
  return redis.call('HMGET', prefix .. 'r:' .. member,
    'state', 'owner', 'who', 'at', 'held', 'charged', 'drawn', 'progress', 'prices')
end

-- What tokens and energy cost: progress is {input, cached, output, millijoules}, prices {input, cached, output, joule}.
-- Energy may be more millijoules times units than a double holds, so whole joules are counted first.
local function cost_of(progress, prices)
  local energy, joule = progress[4] or 0, prices[4] or 0
  local whole = math.floor(energy / 1000)
  return (progress[1] - progress[2]) * prices[1] + progress[2] * prices[2] + progress[3] * prices[3]
    + whole * joule + math.floor((energy - whole * 1000) * joule / 1000)
end

-- Ends a reservation: refunds what it held, charges what `total` has more than was charged before. Reservations of an
-- older version know no energy.
local function close(member, record, total, reason)
  local before, used, is_charged = numbers(record[6]), {}, false
  for position = 1, CHARGE do
    used[position] = above(total[position], before[position] or 0)
    is_charged = is_charged or used[position] > 0
  end
  local is_open = record[1] == 'open'
  move(record[7], numbers(record[5]), { used[1], used[2], used[4] }, is_open)
  if is_open then
    redis.call('ZREM', prefix .. 'open', member)
  end
  if is_charged then
    book(reason, member, record[3], record[4], used)
  end
end

-- Charges a reservation whose lease has ended for what its gateway last told of it.
local function expire(member)
  local record = read(member)
  if record[1] ~= 'open' then
    redis.call('ZREM', prefix .. 'open', member)
    return
  end
  local p, before = numbers(record[8]), numbers(record[6])
  local total = { 1, p[1], p[2], p[3], cost_of(p, numbers(record[9])), p[4] or 0 }
  close(member, record, total, 'expired')
  local charged = {}
  for position = 1, CHARGE do
    charged[position] = int(math.max(total[position], before[position] or 0))
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

-- Whether the windows, pairs of start and end that `plan` begins with, hold the server's time; where they end in it.
local function timely(plan)
  local last = 1 + 2 * plan[1]
  for position = 2, last, 2 do
    if now < plan[position] or now >= plan[position + 1] then
      return nil
    end
  end
  return last
end
