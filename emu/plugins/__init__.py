"""Classes of a user's own: named by a configuration, or given as objects from Python.

    package.module:Class        from a module beside the configuration, or on the path
    ./file.py:Class             from a file, relative to the configuration
    named(Class)                a class as an object, under a name that a configuration can hold

Importing such a class runs its code. `forbid` refuses all of them. Whatever is wrong with one is an
InputError before the run, or a PluginError during it: one line that names the key, the class, the
file and the line.
"""
