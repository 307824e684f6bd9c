"""The command `sparsejax`: flags, what each command does, the report and the demo.

The top floor: nothing imports it, but for `load_model` and `write_report`, which are public.
"""
