"""Plans and measurements for people to look at: a page, a picture, a file for trace viewers. No torch in here."""
