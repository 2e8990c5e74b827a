-- What a script that debits is told: a blob of doubles. The plan of its windows: from when until when (seconds) they
-- hold the server's time, and of each of five windows the id and the end (seconds). Then, for each scope, in the order
-- of its keys: how many windows it counts in, 1 if it counts requests in progress, its limit of these, the burst times
-- its interval, that interval (microseconds; 0: no burst), which of the windows ends last (0: it counts in none); and
-- for each window which one it is, the limits of tokens, requests, input and output, and the one to warn of (0: none).
-- No limit is one that no total reaches.

local FIRST, SCOPE, LIMITS = 13, 6, 6 -- where scopes begin; how many numbers one has, and each of its windows
local WINDOW_KEPT = 120000 -- milliseconds after its end: refunds and readers that come late
local FLOW_KEPT = 86400000 -- milliseconds after a claim: what it counts must outlive it

local now, second = time()

-- The planned windows' counters if every value begins with its own, as most do, and the texts behind them; or nil.
local function in_order(values, plan)
  local texts, others, at = {}, {}, FIRST
  for position, value in ipairs(values) do
    local size = (FLOW + plan[at] * WINDOW) * DOUBLE
    if not value or #value < size then
      return nil
    end
    texts[position], others[position] = value, ''
    if #value > size then
      texts[position], others[position] = string.sub(value, 1, size), string.sub(value, size + 1)
    end
    at = at + SCOPE + plan[at] * LIMITS
  end
  local counters, base = doubles(table.concat(texts)), 0
  at = FIRST
  for _ = 1, #values do
    for window = 1, plan[at] do
      local id = plan[1 + 2 * plan[at + SCOPE + (window - 1) * LIMITS]]
      if counters[base + FLOW + 1 + (window - 1) * WINDOW] ~= id then
        return nil
      end
    end
    base, at = base + FLOW + plan[at] * WINDOW, at + SCOPE + plan[at] * LIMITS
  end
  return counters, others
end

-- The same of values of which some do not: for a new scope, and once a minute.
local function rearranged(values, plan)
  local KEPT = { [MINUTE] = 120, [DAY] = 108000, [MONTH] = 2851200 } -- seconds after its start

  -- Adds to `counters` those of a scope, its planned windows in their order. The text of others that are not long over,
  -- and which of the planned ones are new.
  local function arrange(counters, value, plan, at)
    local before, fresh, taken, others = value and doubles(value) or { 0, 0 }, {}, {}, {}
    counters[#counters + 1], counters[#counters + 2] = before[1], before[2]
    for window = 1, plan[at] do
      local id = plan[1 + 2 * plan[at + SCOPE + (window - 1) * LIMITS]]
      local place = place_of(id, before, FLOW + 1, #before)
      counters[#counters + 1] = id
      for part = 1, WINDOW - 1 do
        counters[#counters + 1] = place and before[place + part] or 0
      end
      if place then
        taken[place] = true
      else
        fresh[window] = true
      end
    end
    for place = FLOW + 1, #before, WINDOW do
      local kind = before[place] % 4
      if not taken[place] and (before[place] - kind) / 4 + KEPT[kind] > second then
        for part = 0, WINDOW - 1 do
          others[#others + 1] = before[place + part]
        end
      end
    end
    return packed(others), fresh
  end

  local counters, others, fresh, at = {}, {}, {}, FIRST
  for position, value in ipairs(values) do
    others[position], fresh[position] = arrange(counters, value, plan, at)
    at = at + SCOPE + plan[at] * LIMITS
  end
  return counters, others, fresh
end

-- The planned windows' counters of all scopes, one after the other; for each scope the text of its other windows, and
-- which of the planned ones are new (nil: none in any).
local function gathered(values, plan)
  local counters, others = in_order(values, plan)
  if counters then
    return counters, others
  end
  return rearranged(values, plan)
end

-- Writes the counters of all scopes, each of which lives until its last window has ended, and longer than any request
-- in progress. Gives their text, without the others.
local function keep(keys, counters, others, plan)
  local text, from, at = packed(counters), 1, FIRST
  local least = second * 1000 + FLOW_KEPT
  for position, key in ipairs(keys) do
    local size, last, ends = (FLOW + plan[at] * WINDOW) * DOUBLE, plan[at + 5], least
    if last > 0 then
      ends = math.max(plan[2 + 2 * last] * 1000 + WINDOW_KEPT, least)
    end
    redis.call('SET', key, string.sub(text, from, from + size - 1) .. others[position], 'PXAT', ends)
    from, at = from + size, at + SCOPE + plan[at] * LIMITS
  end
  return text
end
