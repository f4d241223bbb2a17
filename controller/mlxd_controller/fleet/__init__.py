"""Workers on several machines: an agent on each, and a launcher and a probe over their agents.

Only `ray_nodes` may be imported with the extra alone; everything else knows no Ray.
"""
