"""Whether a run can start on its hosts: looks at all of them before anything of it is loaded. Imports
no torch."""
