"""The commands of ``python -m deepspeed_muon``. Nothing in the package imports them but its start as a program."""
