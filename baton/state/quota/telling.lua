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
