"""What packing and pretrain both stand on: errors, files that survive a crash and their locks and hashes, YAML and JSON, typed
settings, command lines, signals, progress, units, tables, attributes that have other values for a while."""
