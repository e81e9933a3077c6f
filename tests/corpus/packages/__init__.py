"""Models of other people's packages, in their own classes with small configs.

`make corpus-packages` installs what requirements.txt names into a folder of its own, compiles every
row (ROWS="timm diffusers" for some) and prints a record for each; nothing here is imported by `make
test`. kit.py says what a row is. Records are not kept yet.
"""
