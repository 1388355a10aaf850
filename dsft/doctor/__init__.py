"""Check whether a run can start on its hosts, on all of them before any rank loads anything. Imports no
torch."""
