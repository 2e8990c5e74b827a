-- How a reservation ends: moved from reserved to used, charged, booked. Most calls need none of it, or a part, so these
-- functions are made when they are needed.

local function ending()
  -- Tells of a window, whose numbers begin at `at`, when it is used to a higher percentage than was told before.
  local function warn(key, counters, at, percent)
    local KIND_NAMES = { [DAY] = 'day', [MONTH] = 'month' }
    local kind, limit, used = counters[at] % 4, counters[at + 7], counters[at + 5] + counters[at + 6]
    counters[at + 8] = percent
    redis.call('XADD', prefix .. 'alerts', 'MAXLEN', '~', ALERTS_KEPT, '*',
      'bucket', KIND_NAMES[kind] .. ':' .. (counters[at] - kind) / 4 .. ':' .. string.sub(key, #prefix + 1),
      'percent', percent, 'limit', string.format('%.0f', limit), 'used', string.format('%.0f', used))
  end

  -- Moves what was held, {requests, input, output}, to what was used, in every window that is still there, and a
  -- request in progress less if it `leaves`. `drawn`, from `at` on, tells the windows of each of the keys. Counters that
  -- were evicted and begun anew do not know what is given back to them; their reserved part stops at 0.
  local function move(keys, drawn, at, held, used, leaves)
    local held_requests, held_input, held_output = held[1], held[2], held[3]
    local used_requests, used_input, used_output = used[1], used[2], used[3]
    local values = redis.call('MGET', unpack(keys))
    for position = 1, #keys do
      values[position] = values[position] or ''
    end
    local counters, base = doubles(table.concat(values)), 1
    for position, value in ipairs(values) do
      local next_base, last = base + #value / DOUBLE, at + 1 + drawn[at + 1]
      local next_place = base + FLOW
      if leaves and value ~= '' then
        counters[base] = above(counters[base], drawn[at])
      end
      for window = at + 2, last do
        local place, id = next_place, drawn[window]
        if place >= next_base or counters[place] ~= id then
          place = place_of(id, counters, base + FLOW, next_base - 1)
        end
        if place then
          local requests, input, output = counters[place + 4], counters[place + 5], counters[place + 6]
          local other_requests = counters[place + 1] - requests - held_requests
          local other_input = counters[place + 2] - input - held_input
          local other_output = counters[place + 3] - output - held_output
          requests, input, output = requests + used_requests, input + used_input, output + used_output
          counters[place + 1] = other_requests > 0 and requests + other_requests or requests
          counters[place + 2] = other_input > 0 and input + other_input or input
          counters[place + 3] = other_output > 0 and output + other_output or output
          counters[place + 4], counters[place + 5], counters[place + 6] = requests, input, output
          local limit, tokens, percent = counters[place + 7], input + output, 0
          if limit > 0 and tokens * 2 >= limit then
            percent = tokens >= limit and 100 or tokens * 100 >= limit * 80 and 80 or 50
          end
          if percent > counters[place + 8] then
            warn(keys[position], counters, place, percent)
          end
          next_place = place + WINDOW
        end
      end
      base, at = next_base, last + 1
    end
    local text, from = packed(counters), 1
    for position, value in ipairs(values) do
      local till = from + #value
      if till > from then
        redis.call('SETRANGE', keys[position], '0', string.sub(text, from, till - 1))
      end
      from = till
    end
  end

  -- One line of the ledger: `used` is a text of what a charge counts.
  local function book(reason, member, tenant, key, model, at, used)
    redis.call('XADD', prefix .. 'ledger', '*', 'at', at, 'reason', reason,
      'request', string.match(member, '^[^/]*/(.*)$'), 'tenant', tenant, 'key', key, 'model', model, 'used', used)
  end

  -- Ends a reservation: refunds what it held, charges what `total` has more than was charged before. `text`, where the
  -- caller has it, is that of `total`.
  local function close(member, r, total, text, reason)
    local numbers, used, is_charged, is_less = r.numbers, {}, false, false
    for position = 1, CHARGE do
      local before, after = numbers[CHARGED + position - 1], total[position]
      used[position] = 0
      if after > before then
        used[position], is_charged = after - before, true
      end
      is_less = is_less or before > 0
    end
    local is_open = r.state == OPEN
    local tenant, key, model, scopes = string.match(r.rest, '^[^\n]*\n([^\n]*)\n([^\n]*)\n([^\n]*)\n(.*)$')
    local keys = {}
    for scope in string.gmatch(scopes, '[^\n]+') do
      keys[#keys + 1] = scope
    end
    local held = { numbers[HELD], numbers[HELD + 1], numbers[HELD + 2] }
    move(keys, numbers, DRAWN, held, { used[1], used[2], used[4] }, is_open)
    if is_open then
      redis.call('ZREM', KEYS[1], member)
    end
    if is_charged then
      if is_less or not text then
        text = string.format('%.0f %.0f %.0f %.0f %.0f %.0f', unpack(used))
      end
      book(reason, member, tenant, key, model, numbers[MOMENT], text)
    end
  end

  return { warn = warn, move = move, book = book, close = close }
end

-- What else may become of one: it ends and stays at a key, as one that expired, or another end is remembered.
local function lapsing()
  local ends = ending()

  -- What tokens and energy cost: prices {input, cached, output, joule}. Energy may be more millijoules times units than
  -- a double holds, so whole joules are counted first.
  local function cost_of(input, cached, output, energy, prices)
    local price, cached_price, output_price, joule = string.match(prices, '^(%d+) (%d+) (%d+) (%d+)$')
    local whole = math.floor(energy / 1000)
    return (input - cached) * price + cached * cached_price + output * output_price
      + whole * joule + math.floor((energy - whole * 1000) * joule / 1000)
  end

  -- Ends a reservation and leaves it at the key, as one that expired. Further arguments are those of SET.
  local function close_to(key, member, r, total, text, reason, ...)
    ends.close(member, r, total, text, reason)
    local numbers = r.numbers
    for position = 1, CHARGE do
      local at = CHARGED + position - 1
      numbers[at] = math.max(total[position], numbers[at])
    end
    r.state, numbers[HELD], numbers[HELD + 1], numbers[HELD + 2] = EXPIRED, 0, 0, 0
    write(key, r, ...)
  end

  -- Charges a reservation for what its gateway last told of it, and leaves it expired.
  local function lapse(key, member, r, reason, ...)
    local numbers = r.numbers
    local input, cached, output, energy = unpack(numbers, PROGRESS, PROGRESS + 3)
    local cost = cost_of(input, cached, output, energy, string.match(r.rest, '^[^\n]*'))
    close_to(key, member, r, { 1, input, cached, output, cost, energy }, nil, reason, ...)
  end

  -- Ends a reservation whose lease has ended.
  local function expire(member)
    local key = prefix .. 'r:' .. member
    local text = redis.call('GET', key)
    local r = text and parsed(text)
    if r and r.state == OPEN then
      lapse(key, member, r, 'expired', 'PX', EXPIRED_KEPT)
    else
      redis.call('ZREM', KEYS[1], member)
    end
  end

  -- Remembers that an admission without a reservation has ended, in the place of one: should its own reserve arrive
  -- only now (sent before the counters were away, read when they came back), it changes nothing. `text` is what is there.
  local function remember(text, member, owner, kept)
    if text then
      redis.call('SET', prefix .. 'd:' .. member .. '\n' .. string.sub(text, 2), 'already', 'PX', kept)
    end
    redis.call('SET', KEYS[2], string.char(DONE) .. owner, 'PX', kept)
  end

  local function expire_all(due)
    for _, member in ipairs(due) do
      expire(member)
    end
  end

  return { close_to = close_to, remember = remember, lapse = lapse, expire_all = expire_all }
end
