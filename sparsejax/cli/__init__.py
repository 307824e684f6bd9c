"""The command `sparsejax`: its flags and commands, runs, reports and the demo.

No other package of ours imports this one. `load_model`, `write_report` and `Example` are public.
"""
