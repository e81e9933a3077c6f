"""Models of other people's packages, in their own classes with small configs.

`make corpus-packages` installs what requirements.txt names into a folder of its own, compiles every
row (ROWS="timm diffusers" for some) and writes bench/results/packages.json and the second part of
docs/coverage.md; nothing here is compiled by `make test`. kit.py says what a row is.
"""
