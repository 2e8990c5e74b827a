"""Quotas: reservations against limits, exact with any number of gateways; what was used goes into a ledger.

``windows`` and ``buckets`` are the arithmetic, ``memory`` and ``shared`` the two stores of counters: one process's, and
Redis with the scripts beside it.
"""
