"""What administrators ask of a gateway: tenants, keys and quotas, what was used, who changed what."""
