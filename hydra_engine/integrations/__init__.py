"""What joins the engine to other libraries; each module here needs the extra of its own name."""
