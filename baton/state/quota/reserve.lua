-- Reserves what a claim needs in all its buckets, or nothing in any.
--
-- ARGV: prefix, member, owner, tenant, key, model, prices, size ("input output"), lease (microseconds), kept
-- (milliseconds), drawn, plan. The plan is a JSON list: how many windows there are, their starts and ends (seconds);
-- then, in the order of `drawn`, for each scope the end of its last window (seconds; 0: it has none), and for each of its
-- fields the limits, -1 for none: of a minute those of tokens, requests, input and output; of a day or month that of
-- tokens and, as a text that is only copied, the one to warn of; of a flow concurrency, burst and the burst's interval.
--
-- Answers lines: status, now, and where it has counters to tell the cost, "requests input output", and the fields' values
-- in the order of `drawn`, empty for one that was never written. Status: granted, with what was debited and the values
-- after it; refused, with what would have been debited, or taken (an open reservation of the same request and size), with
-- the values as they are; in_use (of another size); elsewhen (the windows do not hold the server's time).

local member, owner, size, kept, drawn, plan = ARGV[2], ARGV[3], ARGV[8], ARGV[10], ARGV[11], cjson.decode(ARGV[12])
local DUE = 16

local at, moment = timely(plan), int(now)
if not at then
  return 'elsewhen\n' .. moment
end
expire_due(DUE)

local known = read(member)
local requests, input, output = 1, string.match(size, '^(%d+) (%d+)$')
input, output = tonumber(input), tonumber(output)
local cost, charged = '1 ' .. size, NO_CHARGE
local is_open = known and known.state == 'open'
if is_open then
  if known.size ~= size then
    return 'in_use\n' .. moment
  end
  requests, input, output, cost = 0, 0, 0, '0 0 0'
elseif known and known.size == size then
  charged = known.charged
  local before = numbers(charged)
  requests, input, output = above(1, before[1]), above(input, before[2]), above(output, before[4])
  cost = requests .. ' ' .. input .. ' ' .. output
end
local tokens = input + output
local is_refused, exhausted = false, {}

-- Each takes a field's value, or false, and gives it with the claim in it; whether a limit breaks is noted.
local function minute(value)
  local rt, it, ot, used = 0, 0, 0, ' 0 0 0'
  if value then
    rt, it, ot, used = string.match(value, '^(%d+) (%d+) (%d+)(.*)$')
  end
  rt, it, ot = rt + requests, it + input, ot + output
  local most, most_requests, most_input, most_output = plan[at + 1], plan[at + 2], plan[at + 3], plan[at + 4]
  at = at + 4
  if most >= 0 and tokens > 0 and it + ot > most
    or most_requests >= 0 and requests > 0 and rt > most_requests
    or most_input >= 0 and input > 0 and it > most_input
    or most_output >= 0 and output > 0 and ot > most_output then
    is_refused = true
  end
  return rt .. ' ' .. it .. ' ' .. ot .. used
end

local function long_window(value, scope, field)
  local total, used = 0, ' 0 0'
  if value then
    total, used = string.match(value, '^(%d+) %-?%d+(.*)$')
  end
  local most, warn = plan[at + 1], plan[at + 2]
  at, total = at + 2, total + tokens
  if most >= 0 and tokens > 0 and total > most then
    is_refused = true
    if value and tonumber(warn) > 0 and tonumber(string.match(used, '%d+$')) < 100 then
      exhausted[#exhausted + 1] = { scope, field, value, tonumber(warn), tonumber(string.match(used, '%d+')) }
    end
  end
  return total .. ' ' .. warn .. used
end

local function flow(value)
  local running, arrival = 0, '0'
  if value then
    running, arrival = string.match(value, '^(%d+) (%d+)$')
  end
  running = running + 1
  local most, burst, interval = plan[at + 1], plan[at + 2], plan[at + 3]
  at = at + 3
  if most >= 0 and running > most then
    is_refused = true
  end
  if interval > 0 then
    local whole = math.max(now, tonumber(arrival)) + requests * interval
    if burst >= 0 and requests > 0 and whole - now > burst * interval then
      is_refused = true
    end
    arrival = int(whole)
  end
  return running .. ' ' .. arrival
end

local scopes = cjson.decode(drawn)
local before, after = { '', moment, cost }, { 'granted', moment, cost }
for _, scope in ipairs(scopes) do
  local values, changed = redis.call('HMGET', prefix .. scope[1], unpack(scope, 2)), {}
  at = at + 1
  scope.ends, scope.changed = plan[at], changed
  for position = 2, #scope do
    local field, value, with_claim = scope[position], values[position - 1], nil
    local kind = string.sub(field, 1, 3)
    if kind == 'flo' then
      with_claim = flow(value)
    else
      with_claim = kind == 'min' and minute(value) or long_window(value, scope[1], field)
      scope.opens = scope.opens or not value
    end
    before[#before + 1] = value or ''
    after[#after + 1] = with_claim
    changed[2 * position - 3], changed[2 * position - 2] = field, with_claim
  end
end

if is_open then
  redis.call('SET', prefix .. 'd:' .. member .. '\n' .. known.owner, 'superseded', 'PX', kept)
  known.owner = owner
  write(member, known)
  redis.call('ZADD', prefix .. 'open', int(now + ARGV[9]), member)
  before[1] = 'taken'
  return table.concat(before, '\n')
end
if is_refused then
  for _, full in ipairs(exhausted) do
    redis.call('HSET', prefix .. full[1], full[2], (string.gsub(full[3], '%d+$', '100')))
    alert(full[2], full[1], 100, full[4], full[5])
  end
  before[1] = 'refused'
  return table.concat(before, '\n')
end

for _, scope in ipairs(scopes) do
  local key = prefix .. scope[1]
  redis.call('HSET', key, unpack(scope.changed))
  if scope.opens then
    turn(key, scope.ends)
  elseif scope.ends == 0 then
    redis.call('PEXPIRE', key, FLOW_KEPT)
  end
end
if known then
  redis.call('SET', prefix .. 'd:' .. member .. '\n' .. known.owner, 'superseded', 'PX', kept)
end
write(member, { state = 'open', at = moment, size = size, held = cost, charged = charged, progress = '0 0 0 0',
  prices = ARGV[7], drawn = drawn, tenant = ARGV[4], key = ARGV[5], model = ARGV[6], owner = owner })
redis.call('ZADD', prefix .. 'open', int(now + ARGV[9]), member)
return table.concat(after, '\n')
