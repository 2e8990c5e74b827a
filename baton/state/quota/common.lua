-- The beginning of every quota script. All keys of an organisation have its hash tag and so one slot; KEYS[1] routes the
-- call there, the others are made from the prefix, because leases that end are found here and not by the caller.
--
-- <prefix>open      sorted set: open reservations by the end of their lease (microseconds)
-- <prefix>r:<member>            one reservation, a line for each of its fields; member is tenant/request id
-- <prefix>d:<member>\n<owner>   this admission is settled or superseded: it cannot be charged again
-- <prefix><scope>   hash: a field for each window, named by its kind and start, and the field flow. "total" is what was
--                   used and what is reserved:
--   minute:<start>              "requests input output requests input output", the totals and then what was used
--   day:<start>, month:<start>  "total limit used percentage" of tokens: the limit to warn of (-1: none) and the highest
--                               percentage warned of
--   flow                        "running arrival", the latter that of the burst
-- <prefix>ledger, <prefix>alerts   streams
--
-- What a claim draws on is told in JSON, [[scope, field, ...], ...], which is parsed faster than any text of our own.
-- A script holds up the server, so it makes few calls and few strings. To write a number is dearest, dearer than to read
-- four: what does not change stays text, and reserving changes totals only.
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
local NO_CHARGE = '0 0 0 0 0 0'
local RECORD = '^' .. string.rep('([^\n]*)\n', 11) .. '(.*)$'

local function int(number)
  return string.format('%.0f', number)
end

local function numbers(text)
  local found, count = {}, 0
  for word in string.gmatch(text, '%d+') do
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

-- After a new window was written: the scope lives until its last window has ended (in seconds), longer than any request
-- in progress, and forgets windows that are long over.
local function turn(key, ends)
  redis.call('PEXPIREAT', key, int(math.floor(math.max(ends * 1000 + WINDOW_KEPT, now / 1000 + FLOW_KEPT))))
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
  if percent <= tonumber(before) then
    return before
  end
  alert(field, scope, percent, limit, used)
  return percent
end

-- A counter's total after its reserved part was given `held` back, and what it used, which is now `after`, grew.
-- Counters that were evicted and begun anew do not know what is given back to them; the reserved part stops at 0.
local function total_after(total, used, held, after)
  local sum = after + above(total - used, held)
  return sum == tonumber(total) and total or sum
end

-- Moves what was held to what was used, in every window that is still there; a request in progress less if it leaves.
local function move(drawn, held, used, leaves)
  local tokens_held, tokens_used = held[2] + held[3], used[2] + used[3]
  for _, scope in ipairs(cjson.decode(drawn)) do
    local name, key = scope[1], prefix .. scope[1]
    local values, changed = redis.call('HMGET', key, unpack(scope, 2)), {}
    for position = 2, #scope do
      local field, value, after = scope[position], values[position - 1], nil
      local kind = string.sub(field, 1, 3)
      if value and kind == 'flo' then
        local running, arrival = string.match(value, '^(%d+)(.*)$')
        after = leaves and above(tonumber(running), 1) .. arrival
      elseif value and kind == 'min' then
        local rt, it, ot, ru, iu, ou = string.match(value, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+)$')
        local requests, input, output = ru + used[1], iu + used[2], ou + used[3]
        after = total_after(rt, ru, held[1], requests) .. ' ' .. total_after(it, iu, held[2], input) .. ' '
          .. total_after(ot, ou, held[3], output) .. ' ' .. requests .. ' ' .. input .. ' ' .. output
      elseif value then
        local total, limit, before, percent = string.match(value, '^(%d+) (%-?%d+) (%d+) (%d+)$')
        local tokens = before + tokens_used
        after = total_after(total, before, tokens_held, tokens) .. ' ' .. limit .. ' ' .. tokens .. ' '
          .. warned(field, name, tokens, tonumber(limit), percent)
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

-- One line of the ledger: used is {requests, input, cached, output, cost, energy}.
local function book(reason, member, tenant, key, model, at, used)
  redis.call('XADD', prefix .. 'ledger', '*', 'at', at, 'reason', reason,
    'request', string.match(member, '^[^/]*/(.*)$'), 'tenant', tenant, 'key', key, 'model', model,
    'requests', used[1], 'input', int(used[2]), 'cached', int(used[3]), 'output', int(used[4]),
    'cost', int(used[5]), 'energy', int(used[6]))
end

-- A reservation, or nil. `owner`, which may hold any text, is its last line.
local function read(member)
  local text = redis.call('GET', prefix .. 'r:' .. member)
  if not text then
    return nil
  end
  local state, at, size, held, charged, progress, prices, drawn, tenant, key, model, owner = string.match(text, RECORD)
  return { state = state, at = at, size = size, held = held, charged = charged, progress = progress, prices = prices,
    drawn = drawn, tenant = tenant, key = key, model = model, owner = owner }
end

-- Writes a reservation; further arguments are those of SET.
local function write(member, r, ...)
  redis.call('SET', prefix .. 'r:' .. member, table.concat({ r.state, r.at, r.size, r.held, r.charged, r.progress,
    r.prices, r.drawn, r.tenant, r.key, r.model, r.owner }, '\n'), ...)
end

-- What tokens and energy cost: progress is {input, cached, output, millijoules}, prices {input, cached, output, joule}.
-- Energy may be more millijoules times units than a double holds, so whole joules are counted first.
local function cost_of(progress, prices)
  local energy, joule = progress[4], prices[4]
  local whole = math.floor(energy / 1000)
  return (progress[1] - progress[2]) * prices[1] + progress[2] * prices[2] + progress[3] * prices[3]
    + whole * joule + math.floor((energy - whole * 1000) * joule / 1000)
end

-- Ends a reservation: refunds what it held, charges what `total` has more than was charged before.
local function close(member, record, total, reason)
  local before, used, is_charged = numbers(record.charged), {}, false
  for position = 1, CHARGE do
    used[position] = above(total[position], before[position])
    is_charged = is_charged or used[position] > 0
  end
  local is_open = record.state == 'open'
  move(record.drawn, numbers(record.held), { used[1], used[2], used[4] }, is_open)
  if is_open then
    redis.call('ZREM', prefix .. 'open', member)
  end
  if is_charged then
    book(reason, member, record.tenant, record.key, record.model, record.at, used)
  end
end

-- Charges a reservation whose lease has ended for what its gateway last told of it.
local function expire(member)
  local record = read(member)
  if not record or record.state ~= 'open' then
    redis.call('ZREM', prefix .. 'open', member)
    return
  end
  local p, before = numbers(record.progress), numbers(record.charged)
  local total = { 1, p[1], p[2], p[3], cost_of(p, numbers(record.prices)), p[4] }
  close(member, record, total, 'expired')
  local charged = {}
  for position = 1, CHARGE do
    charged[position] = int(math.max(total[position], before[position]))
  end
  record.state, record.held, record.charged = 'expired', '0 0 0', table.concat(charged, ' ')
  write(member, record, 'PX', EXPIRED_KEPT)
end

local function expire_due(most)
  local due = redis.call('ZRANGEBYSCORE', prefix .. 'open', '-inf', int(now), 'LIMIT', 0, most)
  for _, member in ipairs(due) do
    expire(member)
  end
  return #due
end

-- Whether the windows, pairs of start and end (seconds) that `plan` begins with, hold the server's time; where they end
-- in it.
local function timely(plan)
  local second, last = tonumber(clock[1]), 1 + 2 * plan[1]
  for position = 2, last, 2 do
    if second < plan[position] or second >= plan[position + 1] then
      return nil
    end
  end
  return last
end
