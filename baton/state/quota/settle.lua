-- Ends an admission with what was delivered: moves it from reserved to used, refunds the rest, writes the ledger.
--
-- ARGV: prefix, member, owner, charge (requests, input, cached, output, cost, energy), kept (milliseconds that this end is
-- remembered). Answers settled, already, superseded, or missing: there is neither reservation nor memory of one.

local member, owner = ARGV[2], ARGV[3]
local done = prefix .. 'd:' .. member .. '\n' .. owner
local record = read(member)
if not record or record.owner ~= owner then
  local ended = redis.call('GET', done)
  if ended then
    return ended
  end
  return record and 'superseded' or 'missing'
end
close(member, record, numbers(ARGV[4]), record.state == 'open' and 'settled' or 'late')
redis.call('DEL', prefix .. 'r:' .. member)
redis.call('SET', done, 'already', 'PX', ARGV[5])
return 'settled'
