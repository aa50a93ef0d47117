"""Attention backends: base.py is the contract, capabilities.py its data; one file a backend."""
