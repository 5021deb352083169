"""What trainers with loaders of their own need to take packs: one module each, imported by its name."""
