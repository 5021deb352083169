"""Training side of padless: packed folders in, batches out."""
