"""The files that make a run resumable and auditable: records, ledger, checkpoints and their audit."""
