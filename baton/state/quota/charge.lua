-- Charges an admission that has no reservation: it was served while the shared counters were away or lost it.
--
-- ARGV: prefix, member, owner, who, charge (requests, input, cached, output, cost, energy), kept (milliseconds), drawn,
-- plan, the latter two as for a reservation. Answers {status, now}: settled, already, superseded (the request is reserved
-- again), elsewhen (the windows do not hold the server's time).

local member, owner, drawn, plan = ARGV[2], ARGV[3], ARGV[7], cjson.decode(ARGV[8])
local at = timely(plan)
if not at then
  return { 'elsewhen', now }
end
local done = prefix .. 'd:' .. member .. '\n' .. owner
local ended = redis.call('GET', done)
if ended then
  return { ended, now }
end
if redis.call('EXISTS', prefix .. 'r:' .. member) == 1 then
  return { 'superseded', now }
end
for _, scope in ipairs(scopes_of(drawn)) do
  local opens, ends = false, 0
  for _, field in ipairs(scope[2]) do
    if field == 'flow' then
      at = at + 3
    else
      opens = redis.call('HSETNX', scope[1], field, '0 0 0 0 0 0 ' .. plan[at + 3] .. ' 0') == 1 or opens
      ends = math.max(ends, plan[at + 1])
      at = at + (string.sub(field, 1, 3) == 'min' and 6 or 3)
    end
  end
  if opens then
    turn(scope[1], ends)
  end
end
local used = numbers(ARGV[5])
move(drawn, { 0, 0, 0 }, { used[1], used[2], used[4] }, false)
book('unreserved', member, ARGV[4], int(now), used)
redis.call('SET', done, 'already', 'PX', ARGV[6])
return { 'settled', now }
