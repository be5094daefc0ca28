"""Mutation testing: how many small faults in the sources do the tests notice?

``python -m benchmarks.mutants`` (``nox -s mutants``) puts one fault at a time into a copy of the
repository and runs the tests of its room. ``rooms.toml`` has the rooms, ``results.json`` the
mutants that were tried and what became of them.

The faults are those of cosmic-ray, used as a library: its operators, and ``mutate_code``. They
change the text of a file, so mutants reach processes that a test starts, ``torch.compile`` and
code of modules and classes. mutmut 3 instead replaces functions by trampolines that read an
environment variable: TorchDynamo would trace the trampoline, pickles and signatures would change,
and code outside of functions would have no mutants. It also runs the tests in forks of one
process, which torch's threads do not survive, and knows one source folder. cosmic-ray's own
command is not used, because it changes the working tree in place, numbers the mutants of a file
(so an edit above a mutant would rename it), has one test command for a session, and leaves the
processes of a failed test running.
"""
