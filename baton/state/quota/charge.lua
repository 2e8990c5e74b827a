-- Charges an admission that has no reservation: it was served while the shared counters were away or lost it.
--
-- ARGV: prefix, member, owner, tenant, key, model, charge (requests, input, cached, output, cost, energy), kept
-- (milliseconds), drawn, plan, the latter two as for a reservation. Answers lines: status and now. Status: settled,
-- already, superseded (the request is reserved again), elsewhen (the windows do not hold the server's time).

local member, owner, drawn, plan = ARGV[2], ARGV[3], ARGV[9], cjson.decode(ARGV[10])
local at, moment = timely(plan), int(now)
if not at then
  return 'elsewhen\n' .. moment
end
local done = prefix .. 'd:' .. member .. '\n' .. owner
local ended = redis.call('GET', done)
if ended then
  return ended .. '\n' .. moment
end
if redis.call('EXISTS', prefix .. 'r:' .. member) == 1 then
  return 'superseded\n' .. moment
end
for _, scope in ipairs(cjson.decode(drawn)) do
  local key, opens = prefix .. scope[1], false
  at = at + 1
  local ends = plan[at]
  for position = 2, #scope do
    local field = scope[position]
    local kind = string.sub(field, 1, 3)
    if kind == 'flo' then
      at = at + 3
    elseif kind == 'min' then
      opens = redis.call('HSETNX', key, field, '0 0 0 0 0 0') == 1 or opens
      at = at + 4
    else
      opens = redis.call('HSETNX', key, field, '0 ' .. plan[at + 2] .. ' 0 0') == 1 or opens
      at = at + 2
    end
  end
  if opens then
    turn(key, ends)
  end
end
local used = numbers(ARGV[7])
move(drawn, { 0, 0, 0 }, { used[1], used[2], used[4] }, false)
book('unreserved', member, ARGV[4], ARGV[5], ARGV[6], moment, used)
redis.call('SET', done, 'already', 'PX', ARGV[8])
return 'settled\n' .. moment
