// Not a module: it runs before the first paint, which would otherwise be in the wrong colors.

const theme = localStorage.getItem("theme");
if (theme) document.documentElement.dataset.theme = theme;
