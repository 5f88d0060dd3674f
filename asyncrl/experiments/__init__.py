"""The experiments of the package, as TOML files; `config/sources/packaged_experiments.py` reads them."""
