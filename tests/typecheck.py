"""The run-time type checker of the test run: beartype, where an int is a float as in PEP 484."""

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
