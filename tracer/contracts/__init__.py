"""What a SGLang package lets kvwitness prove, read from its source: nothing of SGLang is imported or run.

``source`` reads a package (a folder or a wheel), ``facts`` keeps what was read, ``check`` compares it with
the hooks, ``prove`` says which links of the chain follow, ``support`` writes that down for many releases.
"""
