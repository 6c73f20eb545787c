"""What a person sees: the end card, the page, `intune watch`."""
