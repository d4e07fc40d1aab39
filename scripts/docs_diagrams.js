// Draws the diagrams of a page. Mermaid, 3 MB, is loaded only where there are some; build_docs.py puts it beside this file.
const diagrams = document.querySelectorAll("div.diagram");
if (diagrams.length) {
  const mermaid = document.createElement("script");
  mermaid.src = new URL("mermaid.min.js", document.currentScript.src);
  mermaid.onload = () => {
    const dark = document.body.getAttribute("data-md-color-scheme") === "slate";
    window.mermaid.initialize({ startOnLoad: false, theme: dark ? "dark" : "default" });
    window.mermaid.run({ nodes: diagrams });
  };
  document.head.append(mermaid);
}
