-- Ends an admission with what was delivered: moves it from reserved to used, refunds the rest, writes the ledger.
--
-- KEYS: open, the reservation. ARGV: owner, charge (requests, input, cached, output, cost, energy) as text, and in
-- doubles the same and kept (milliseconds that this end is remembered). Answers settled, already, superseded, or
-- missing: there is neither reservation nor memory of one, so what was delivered is still to be charged; nothing was
-- where no request is. What another owner had delivered before this one took over is charged even then, and the client
-- may go on once more.

local owner, text = ARGV[1], redis.call('GET', KEYS[2])
if text == string.char(DONE) .. owner then
  return 'already'
end
local member, numbers = string.sub(KEYS[2], #prefix + 3), doubles(ARGV[3])
local r = text and parsed(text)
if not r or r.owner ~= owner then
  local key = prefix .. 'd:' .. member .. '\n' .. owner
  local ended = redis.call('GET', key)
  if ended then
    return ended
  elseif r then
    redis.call('SET', key, 'superseded', 'PX', numbers[CHARGE + 1])
    return 'superseded'
  elseif numbers[1] == 0 then
    ending().remember(text, member, owner, numbers[CHARGE + 1])
  end
  return 'missing'
end
local reason = r.state == OPEN and 'settled' or 'late'
if numbers[1] == 0 and r.numbers[PROGRESS] + r.numbers[PROGRESS + 2] > 0 then
  ending().lapse(member, r, reason)
  return 'settled'
end
ending().close(member, r, numbers, ARGV[2], reason)
redis.call('SET', KEYS[2], string.char(DONE) .. owner, 'PX', numbers[CHARGE + 1])
return 'settled'
