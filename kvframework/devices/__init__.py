"""The part above every accelerator's driver: export of memory, planning, copier processes, completion."""
