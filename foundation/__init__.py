"""What packing and pretrain both stand on: errors, files that survive a crash, typed settings, progress, units, tables,
attributes that have other values for a while."""
