"""Reports: the per-request ledger, cell records, JSON lines, Prometheus metrics and text."""
