"""The built-in training backend: models of transformers, alone or sharded over ranks with torch's FSDP2."""
