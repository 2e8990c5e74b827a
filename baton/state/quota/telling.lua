-- What a gateway tells of a reservation: `told` is a text of input, cached, output, millijoules. Whether it was noted:
-- who tells less than is known is late, or has taken the request over and delivered nothing of its own yet.

local function tell(r, told)
  local numbers, input, cached, output, energy = r.numbers, string.match(told, '^(%d+) (%d+) (%d+) (%d+)$')
  input, output = tonumber(input), tonumber(output)
  if input < numbers[PROGRESS] or output < numbers[PROGRESS + 2] then
    return false
  end
  numbers[PROGRESS], numbers[PROGRESS + 1], numbers[PROGRESS + 2] = input, tonumber(cached), output
  numbers[PROGRESS + 3] = math.max(numbers[PROGRESS + 3], tonumber(energy))
  return true
end

-- What is told late, or by an owner whose place another one has taken.
local function late()
  -- Notes what is told of the reservation at the key. Of one that has ended it is charged at once.
  local function note(key, member, r, told)
    if not tell(r, told) then
      return -- more is known
    elseif r.state == OPEN then
      write(key, r)
    else
      lapsing().lapse(key, member, r, 'late', 'KEEPTTL')
    end
  end

  -- Notes what an owner had delivered when another one took its place. `ended` is how that is remembered.
  local function note_superseded(member, ended, told)
    local first = string.sub(ended, SUPERSEDED_SIZE + 1)
    if first == '' or string.match(told, '^0 %d+ 0 ') then
      return -- it never had the reservation, or delivered nothing
    end
    local key = prefix .. 'r:' .. member
    local text = redis.call('GET', key)
    local r = text and parsed(text)
    if not r or (r.first or r.owner) ~= first then -- that admission has ended, and the id may be another one's
      key = prefix .. 'a:' .. member .. '\n' .. first
      text = redis.call('GET', key)
      r = text and parsed(text)
    end
    if r then
      note(key, member, r, told)
    end
  end

  return { note = note, note_superseded = note_superseded }
end
