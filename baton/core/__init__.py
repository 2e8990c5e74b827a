"""The vocabulary of Baton: plain types, the Api protocols, errors, clock, block hashes. Standard library only."""
