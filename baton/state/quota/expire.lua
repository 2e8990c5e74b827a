-- Ends reservations whose lease has ended. ARGV: prefix, how many at most. Answers how many it found.

return expire_due(tonumber(ARGV[2]))
