"""What packing and pretrain both stand on: errors, files that survive a crash, files read within limits, locks, hashes, typed
settings, progress, units, tables, attributes that have other values for a while, how a process ends."""
