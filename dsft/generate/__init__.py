"""Write what starts a run: the DeepSpeed JSON, hostfiles and launch scripts of a spec. Text alone."""
