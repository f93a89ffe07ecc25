"""Code that runs on nodes: standard library only, Python 3.8 or newer, and it imports only itself.

``provision/run_on_nodes.py`` sends the modules; nothing is installed. The shell scripts are filled in
by ``provision/user_data.py``, ``provision/install.py``, and ``provision/bake.py``.
"""
