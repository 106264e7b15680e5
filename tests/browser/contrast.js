// The texts of the page whose contrast to what is behind them is below WCAG AA's 4.5 : 1, as the browser computed it.
(() => {
  const rgb = (text) => text.match(/[\d.]+/g).map(Number);
  const part = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => [r, g, b].reduce((sum, v, i) => sum + part(v / 255) * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = rgb(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const hasText = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
  const found = [];
  for (const node of document.querySelectorAll("main *, header *")) {
    if (!hasText(node) || !node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    const own = light(rgb(node instanceof SVGElement ? style.fill : style.color));
    const [high, low] = [own, light(behind(node))].sort((x, y) => y - x);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 4.5) found.push(`${node.tagName} ${node.textContent.slice(0, 30)} ${ratio.toFixed(2)}`);
  }
  return found;
})();
